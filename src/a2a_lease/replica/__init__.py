"""One replica among others: its session, its heartbeat, its judgement."""
