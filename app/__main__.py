"""The command line: `bascule`, or `python -m app`."""

from __future__ import annotations

import typer

from app.commands import calls, confirmations, keys, local, sessions, tools
from app.commands.doctor import doctor

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Forwards tool calls of Claude Managed Agents sessions to webhooks.",
)
for command in (local.serve, local.migrate, doctor, local.demo, local.simulate, local.openapi):
    app.command()(command)
for name, group in {
    "tools": tools.app,
    "sessions": sessions.app,
    "calls": calls.app,
    "confirmations": confirmations.app,
    "keys": keys.app,
    "secrets": local.secrets,
    "audit": local.audit,
}.items():
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
