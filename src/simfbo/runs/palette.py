"""The colours of lines in figures."""

COLOURS = ("#0b6e99", "#d1495b", "#3a7d44", "#8d5fb0", "#c77d0a", "#4a4e69", "#d6679c", "#7f5539",
           "#56b4e9", "#a39b00", "#1b998b", "#b36a5e")  # fmt: skip
