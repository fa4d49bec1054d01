"""What the demo prints: first as it happens, then in one table."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Expectation:
    """One thing that had to be seen."""

    what: str
    met: bool
    seen: str
    after: float | None


class Report:
    """Tells the story to a person."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._began = time.monotonic()
        self.expectations: list[Expectation] = []

    def _line(self, text: str) -> None:
        elapsed = time.monotonic() - self._began
        self.console.print(f'[dim]{elapsed:6.2f} s[/]  {text}')

    def tells(self, text: str) -> None:
        """Says what was set up."""
        self._line(f'[bold]{text}[/]')

    def says(self, who: str, what: str, more: str = '') -> None:
        """Says what somebody heard."""
        more = f' [dim]{more}[/]' if more else ''
        self._line(f'[cyan]{who:>16}[/]  {what}{more}')

    def kills(self, name: str, pid: int) -> None:
        """Says that a replica is killed."""
        self._line(f'[bold red]SIGKILL to replica {name} (pid {pid})[/]')

    def expects(
        self,
        what: str,
        met: object,
        *,
        seen: str = '',
        after: float | None = None,
    ) -> None:
        """Notes whether something that had to be seen was."""
        self.expectations.append(
            Expectation(what=what, met=bool(met), seen=seen, after=after)
        )
        mark = '[green]seen[/]' if met else '[bold red]missed[/]'
        self._line(f'{mark}: {what}')

    @property
    def missed(self) -> list[Expectation]:
        """What should have been seen and was not."""
        return [each for each in self.expectations if not each.met]

    def conclude(self) -> bool:
        """Prints the table.

        Returns:
            Whether everything was right.
        """
        table = Table(title='After the kill')
        table.add_column('What must be seen')
        table.add_column('Seen')
        table.add_column('After the kill', justify='right')
        for each in self.expectations:
            table.add_row(
                each.what,
                f'[green]yes[/] {each.seen}'
                if each.met
                else f'[bold red]NO[/] {each.seen}',
                f'{each.after:.1f} s' if each.after is not None else '',
            )
        self.console.print()
        self.console.print(table)
        for each in self.missed:
            self.console.print(f'[bold red]Missed:[/] {each.what}')
        return not self.missed
