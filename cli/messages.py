"""Messages of the command on standard error: one label in colour, then plain text."""


def print_message(label: str, text: str, *, style: str = "bold red") -> None:
    """Prints "label: text" on standard error, unwrapped; brackets in the text are no markup."""
    from rich.console import Console
    from rich.text import Text

    message = Text.assemble((f"{label}:", style), " ", text)
    Console(stderr=True, soft_wrap=True).print(message, highlight=False)
