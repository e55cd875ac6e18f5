"""Counts and sizes in words."""

MIB, GIB = 2**20, 2**30


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun == 'batch' else 's'}"


def sized(count: int) -> str:
    """Bytes in words."""
    value, unit = (count / GIB, "GiB") if count >= 1000 * MIB else (count / MIB, "MiB")
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
