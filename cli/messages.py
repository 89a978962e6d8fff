"""Messages of the command on standard error: one label in colour, then plain text."""


def print_message(label: str, text: str, *, style: str = "bold red") -> None:
    """Prints "label: text" on standard error, unwrapped; brackets are no markup, secrets blotted out."""
    from rich.console import Console
    from rich.text import Text

    from ..train.record.redaction import redact

    message = Text.assemble((f"{label}:", style), " ", redact(text))
    Console(stderr=True, soft_wrap=True).print(message, highlight=False)
