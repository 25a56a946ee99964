"""The Python blocks of the documents run, one after another in each."""

import pathlib
import re
import unittest

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = ["docs/python.md", "kv-python/README.md"]


class Documents(unittest.TestCase):
    def test_every_block_runs(self):
        for name in DOCUMENTS:
            text = (ROOT / name).read_text(encoding="utf-8")
            blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
            self.assertTrue(blocks, name)
            names = {}
            for block in blocks:
                line = text[: block.start()].count("\n") + 1
                # Errors name the line of the document.
                code = "\n" * line + block.group(1)
                exec(compile(code, name, "exec"), names)


if __name__ == "__main__":
    unittest.main()
