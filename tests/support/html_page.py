"""What a browser would see of a page."""

from html.parser import HTMLParser


class Page(HTMLParser):
    """Elements with their attributes, the cells of tables, and texts; tags must close in order.

    Attributes:
      elements: (tag, attributes) of each.
      texts: outside of scripts, but what is struck out.
      struck: what is struck out.
      rows: the cells of every row of a table.
      scripts: their texts.
    """

    VOID = {"meta", "img", "br", "input", "hr", "link"}

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self.texts, self.struck, self.rows = [], [], [], [], []
        self._open = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    @property
    def tags(self):
        return [tag for tag, _ in self.elements]

    @property
    def text(self):
        return "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, tag

    def handle_data(self, data):
        if self._open[-1:] == ["script"]:
            self.scripts[-1] += data
            return
        (self.struck if self._open[-1:] == ["del"] else self.texts).append(data)
        if {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data
