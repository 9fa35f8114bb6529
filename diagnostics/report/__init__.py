"""Report -> what people and machines read: terminal, JSON, HTML, SARIF, Markdown. Plain functions over the same
data."""
