"""Adds metadata that depends on where the repository is published: the README with absolute links, and project URLs.

A package index shows the README without the files that its links lead to; their address is the environment variable
``ADAPONDER_REPOSITORY=https://host/owner/name``. A build without it keeps relative links and has no project URLs.
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
    base = {"!": f"{repository}/raw/HEAD/", "": f"{repository}/blob/HEAD/"}  # of images and of other links
    # Twice: an image may be the text of a link.
    for _ in range(2):
        readme = link.sub(lambda match: f"{match[1]}{match[2]}({base[match[1]]}{match[3]})", readme)
    pages = {"Documentation": "docs/index.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    urls = {"Source": repository, "Issues": f"{repository}/issues"}
    urls |= {name: f"{repository}/blob/HEAD/{path}" for name, path in pages.items()}

setup(long_description=readme, long_description_content_type="text/markdown", project_urls=urls)
