//! Rules about one source file.
use super::{Problem, crates, strip};

/// Columns of a line.
pub(super) const COLUMNS_MAX: usize = 100;
const LINES_EXPECTED: usize = 400;
const LINES_MAX: usize = 800;
const TEST_LINES_MAX: usize = 150;

/// Files longer than [`LINES_MAX`], each with the reason.
const LONGER: &[(&str, &str)] = &[];

/// Words that stand for unfinished work.
const UNFINISHED: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];

/// Checks tabs and line ends of any text file.
pub(super) fn check_whitespace(place: &str, text: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (number, line) in (1..).zip(text.split('\n')) {
        if line.contains('\t') {
            problems.push(Problem::new(place, number, "tab"));
        }
        if line.ends_with([' ', '\r']) {
            problems.push(Problem::new(
                place,
                number,
                "blank or carriage return at the line's end",
            ));
        }
    }
    if !text.is_empty() && !text.ends_with('\n') {
        problems.push(Problem::new(place, 0, "does not end with a line break"));
    }
    problems
}

/// Checks everything else about a Rust file.
pub(super) fn check(place: &str, text: &str) -> Vec<Problem> {
    let code = strip::code(text);
    let mut problems = Vec::new();
    if !text.starts_with("//!") {
        problems.push(Problem::new(place, 1, "does not open with `//!`: what it is and owns"));
    }
    for ((number, line), code) in (1..).zip(text.lines()).zip(code.lines()) {
        problems.extend(check_line(place, number, line, code));
    }
    problems.extend(check_length(place, text));
    problems.extend(check_tests_length(place, &code));
    problems
}

/// Warns of a file that is longer than one should be.
pub(super) fn check_expected_length(place: &str, text: &str) -> Option<Problem> {
    let lines = text.lines().count();
    let rule = format!("{lines} lines, {LINES_EXPECTED} are expected at most");
    (lines > LINES_EXPECTED).then(|| Problem::new(place, 0, rule))
}

fn check_line(place: &str, number: usize, line: &str, code: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut problem = |rule: String| problems.push(Problem::new(place, number, rule));
    let columns = line.chars().count();
    if columns > COLUMNS_MAX && !line.contains("://") {
        problem(format!("{columns} columns, {COLUMNS_MAX} are possible"));
    }
    for word in UNFINISHED.iter().filter(|word| has_word(code, word)) {
        problem(format!("`{word}` is unfinished work"));
    }
    if code.contains("#[ignore]") {
        problem("a test is ignored without a reason: #[ignore = \"...\"]".to_owned());
    }
    if has_word(code, "unsafe") && !crates::may_use_unsafe(place) {
        problem("`unsafe` outside the crates that may use it".to_owned());
    }
    if is_ignored_fence(line) {
        problem("an example that is not compiled: `ignore` on a code fence".to_owned());
    }
    problems
}

/// Whether a line of a doc comment opens a code fence marked `ignore`.
fn is_ignored_fence(line: &str) -> bool {
    let line = line.trim_start();
    let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
    let fence = doc.and_then(|doc| doc.trim_start().strip_prefix("```"));
    fence.is_some_and(|tags| tags.split([',', ' ']).any(|tag| tag.starts_with("ignore")))
}

/// Whether `word` occurs in code on its own, not as the end or the start of a longer name.
fn has_word(code: &str, word: &str) -> bool {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    code.match_indices(word).any(|(at, _)| {
        let before = code.get(..at).and_then(|text| text.chars().next_back());
        let after = code.get(at.saturating_add(word.len())..).and_then(|text| text.chars().next());
        !before.is_some_and(is_name) && (word.ends_with('!') || !after.is_some_and(is_name))
    })
}

fn check_length(place: &str, text: &str) -> Option<Problem> {
    let lines = text.lines().count();
    let listed = LONGER.iter().any(|(path, reason)| *path == place && !reason.is_empty());
    let rule = format!("{lines} lines: split it, or list it with a reason in {}", file!());
    (lines > LINES_MAX && !listed).then(|| Problem::new(place, 0, rule))
}

/// Unit tests that are longer move to a file of their own.
fn check_tests_length(place: &str, code: &str) -> Option<Problem> {
    let lines: Vec<_> = code.lines().collect();
    let start = lines.iter().position(|line| line.trim_end() == "mod tests {")?;
    let length = lines.get(start..)?.iter().position(|line| line.trim_end() == "}")?;
    let rule =
        format!("{length} lines of tests, more than {TEST_LINES_MAX} get a file of their own");
    (length > TEST_LINES_MAX).then(|| Problem::new(place, start.saturating_add(1), rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> Vec<String> {
        let text = format!("//! Doc.\n{text}");
        check("kv-core/src/a.rs", &text).iter().map(ToString::to_string).collect()
    }

    #[track_caller]
    fn refused(text: &str, words: &str) {
        let problems = problems(text);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].contains(words), "{problems:?}");
    }

    #[test]
    fn a_file_says_what_it_is() {
        assert_eq!(check("a.rs", "use std::fmt;\n").len(), 1);
        assert_eq!(check("a.rs", "//! Doc.\n"), []);
    }

    #[test]
    fn unfinished_work_is_found_in_code_alone() {
        refused("fn f() { todo!() }", "`todo!`");
        refused("fn f() { dbg!(x) }", "`dbg!`");
        assert!(problems("// todo!()\nconst S: &str = \"dbg!\"; fn f() { mydbg!() }").is_empty());
    }

    #[test]
    fn unsafe_stays_in_its_crates() {
        refused("fn f() { unsafe { g() } }", "`unsafe`");
        assert!(problems("#![forbid(unsafe_code)] // unsafe").is_empty());
        assert_eq!(check("kv-cpu/src/a.rs", "//! Doc.\nunsafe fn f() {}\n"), []);
    }

    #[test]
    fn ignored_tests_have_a_reason() {
        refused("#[ignore]\nfn f() {}", "reason");
        assert!(problems("#[ignore = \"takes an hour\"]\nfn f() {}").is_empty());
    }

    #[test]
    fn examples_are_compiled() {
        refused("/// ```ignore\n/// x\n/// ```", "not compiled");
        refused("//! ```rust,ignore", "not compiled");
        assert!(problems("/// ```no_run\n/// ```\nlet s = \"```ignore\";").is_empty());
    }

    #[test]
    fn long_lines_and_files_are_found() {
        refused(&format!("// {}", "x".repeat(98)), "101 columns");
        assert!(problems(&format!("// https://{}", "x".repeat(98))).is_empty());
        refused(&"\n".repeat(LINES_MAX), "801 lines");
        let text = "\n".repeat(LINES_EXPECTED);
        assert!(check_expected_length("a.rs", &text).is_none());
        assert!(check_expected_length("a.rs", &format!("{text}\n")).is_some());
        let tests = format!("mod tests {{\n{}}}", "    f();\n".repeat(TEST_LINES_MAX));
        refused(&tests, "151 lines of tests");
    }

    #[test]
    fn blanks_at_line_ends_are_found() {
        assert_eq!(check_whitespace("a.md", "a \n\tb\r\nc").len(), 4);
        assert_eq!(check_whitespace("a.md", "a\nb\n"), []);
        assert_eq!(check_whitespace("a.md", ""), []);
    }
}
