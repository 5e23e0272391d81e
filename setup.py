"""Adds to pyproject.toml what depends on where the repository is published: absolute links in the README, and URLs.

A package index shows the README without the files beside it: ``ADAPONDER_REPOSITORY=https://host/owner/name`` says
where they are. A build without it keeps relative links and names no URLs.
"""

import os
import re
from pathlib import Path

from setuptools import setup

repository = os.environ.get("ADAPONDER_REPOSITORY", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
urls = {}
if repository:
    link = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)]+)\)")
    place = {"!": f"{repository}/raw/HEAD/", "": f"{repository}/blob/HEAD/"}
    # Twice: an image may be the text of a link.
    for _ in range(2):
        readme = link.sub(lambda found: f"{found[1]}{found[2]}({place[found[1]]}{found[3]})", readme)
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    urls = {"Source": repository, "Issues": f"{repository}/issues"}
    urls |= {name: f"{repository}/blob/HEAD/{path}" for name, path in pages.items()}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
