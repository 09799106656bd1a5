"""Checks that every relative link in the Markdown files resolves: the file, and the heading where one is named."""

import pathlib
import re
import subprocess
import sys

LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|^\[[^\]]+\]:\s*(\S+)", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def prose(path):
    """The text without what stands in code, where brackets are no links."""
    return CODE.sub("", FENCE.sub("", path.read_text(encoding="utf-8")))


def anchors(path):
    """The names that a browser finds the headings under."""
    names = set()
    for heading in re.findall(r"^#+\s+(.*?)\s*#*$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        name, count = plain, 0
        while name in names:
            count += 1
            name = f"{plain}-{count}"
        names.add(name)
    return names


def broken(path, root):
    for found in LINK.finditer(prose(path)):
        link = found.group(1) or found.group(2)
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or root not in [target, *target.parents]:
            yield f"{path.relative_to(root)}: {link}: no such file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            yield f"{path.relative_to(root)}: {link}: no such heading"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=root, check=True, capture_output=True, text=True,
    ).stdout
    pages = [root / name for name in listed.split("\0") if name]
    errors = [error for page in pages if page.exists() for error in broken(page, root)]
    print("\n".join(errors) or f"links of {len(pages)} Markdown files resolve")
    sys.exit(bool(errors))


main()
