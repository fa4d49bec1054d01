"""What happens while an agent runs: admission, the turn, its saves, its end."""
