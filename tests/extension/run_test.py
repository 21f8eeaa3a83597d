#!/usr/bin/env python3
"""run.py refuses what it must: each bad patch with the reason, and counts what a good one changes."""
import contextlib
import io
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import run

TREE = {"megatron/table.cc": "".join(f"  row {i}\n" for i in range(9)), "megatron/CMakeLists.txt": "layer(table.cc)\n",
        "docs/flags.md": "flags\n"}
TEST = {"tests/unit/new/CMakeLists.txt": "megatron_test(new_test SOURCES new_test.cc)\n"}


def edits(first, *changed, path="megatron/table.cc"):
    """A patch with one line of context: `changed` after the line `first` of the table."""
    old = 1 + sum(line[0] == "-" for line in changed)
    new = 1 + sum(line[0] == "+" for line in changed)
    return f"--- a/{path}\n+++ b/{path}\n@@ -{first + 1},{old} +{first + 1},{new} @@\n   row {first}\n" + "".join(line + "\n" for line in changed)


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.write("root", TREE)
        self.enterContext(mock.patch.object(run, "ROOT", self.folder / "root"))
        self.enterContext(mock.patch.object(run, "HERE", self.folder / "patches"))

    def enterContext(self, context):  # unittest has it since Python 3.11
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def write(self, folder, files):
        for name, text in files.items():
            path = self.folder / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def make(self, name, files=None, text=None):
        self.write(f"patches/{name}", {"README.md": ""})
        self.write(f"patches/{name}/files", {**TEST, **(files or {})})
        if text:
            self.write(f"patches/{name}", {"edits.patch": text})

    def check(self, name):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            code = run.check([name], lint=None)
        return code, out.getvalue()

    def test_three_lines_are_accepted_and_counted(self):
        self.make("three", {"megatron/new.cc": "int a;\n" * 50, "megatron/CMakeLists.txt": "sources(new.cc)\n"},
                  edits(4, "-  row 5", "+  row 5, changed", "+  new row"))
        self.assertEqual(self.check("three"), (0, "three        3 existing lines in 1 files, 3 new files\n"))

    def test_four_lines_are_refused(self):
        self.make("four", text=edits(4, "+  a", "+  b", "+  c", "+  d"))
        code, out = self.check("four")
        self.assertEqual(code, 1)
        self.assertIn("refused: 4 existing lines change, at most 3 may: megatron/table.cc 4", out)

    def test_four_lines_in_two_files_are_refused(self):
        self.write("root", {"megatron/other.cc": "  row 0\n"})
        self.make("spread", text=edits(4, "+  a", "+  b") + edits(0, "+  c", "+  d", path="megatron/other.cc"))
        self.assertEqual(self.check("spread")[0], 1)

    def test_a_removed_file_counts_all_of_its_lines(self):
        rows = "".join("-" + line + "\n" for line in TREE["megatron/table.cc"].splitlines())
        self.make("removes", text=f"--- a/megatron/table.cc\n+++ /dev/null\n@@ -1,9 +0,0 @@\n{rows}")
        self.assertIn("9 existing lines change", self.check("removes")[1])

    def test_an_edit_finds_its_line_where_it_has_moved(self):
        self.make("moved", text=edits(4, "+  new row"))
        self.write("root", {"megatron/table.cc": "before\n" * 40 + TREE["megatron/table.cc"]})
        self.assertEqual(self.check("moved")[0], 0)
        with tempfile.TemporaryDirectory() as tree:
            run.checked_tree(self.folder / "patches/moved", Path(tree))
            self.assertIn("row 4\n  new row\n  row 5", (Path(tree) / "megatron/table.cc").read_text())

    def test_an_edit_without_its_line_is_refused(self):
        self.make("stale", text=edits(44, "+  new row"))
        code, out = self.check("stale")
        self.assertEqual(code, 1)
        self.assertIn("edits.patch does not apply", out)

    def test_files_do_not_replace_files(self):
        self.make("hidden", {"megatron/table.cc": "another\n"})
        self.assertIn("files/megatron/table.cc exists in the tree", self.check("hidden")[1])

    def test_cmake_and_generated_documents_do_not_count(self):
        self.make("free", {"megatron/CMakeLists.txt": "a\nb\nc\nd\n"},
                  "--- a/docs/flags.md\n+++ b/docs/flags.md\n@@ -1,1 +1,5 @@\n flags\n+a\n+b\n+c\n+d\n")
        self.assertEqual(self.check("free")[0], 0)

    def test_a_patch_has_a_test(self):
        self.write("patches/untested", {"README.md": "", "files/megatron/new.cc": "int a;\n"})
        self.assertIn("no test", self.check("untested")[1])

    def test_tests_are_found_by_their_names(self):
        self.make("tested", {"tests/cli/new_test.py": ""})
        self.assertEqual(run.tests_of(self.folder / "patches/tested"), (["new_test"], ["new_test", "cli_new_test"]))

    def test_a_tree_that_breaks_the_lint_is_refused(self):
        self.make("good")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(run.check(["good"], lint="/bin/false"), 1)
            self.assertEqual(run.check(["good"], lint="/bin/true"), 0)
        self.assertIn("the lint fails", out.getvalue())


if __name__ == "__main__":
    unittest.main()
