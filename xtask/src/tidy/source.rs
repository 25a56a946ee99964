//! Rules about one source file.
use super::Problem;

/// Largest number of columns of a line.
const COLUMNS_MAX: usize = 100;
const LINES_EXPECTED: usize = 400;
const LINES_MAX: usize = 800;
const TEST_LINES_MAX: usize = 150;

/// Files longer than [`LINES_MAX`], each with the reason.
const LONGER: &[(&str, &str)] = &[];

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
    let mut problems = Vec::new();
    if !text.starts_with("//!") {
        problems.push(Problem::new(place, 1, "does not open with `//!`: what it is and owns"));
    }
    for (number, line) in (1..).zip(text.lines()) {
        problems.extend(check_line(place, number, line));
    }
    problems.extend(check_length(place, text));
    problems.extend(check_tests_length(place, text));
    problems
}

/// Warns about a file that is longer than expected.
pub(super) fn check_expected_length(place: &str, text: &str) -> Option<Problem> {
    let lines = text.lines().count();
    let rule = format!("{lines} lines, {LINES_EXPECTED} are expected at most");
    (lines > LINES_EXPECTED).then(|| Problem::new(place, 0, rule))
}

fn check_line(place: &str, number: usize, line: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut problem = |rule: String| problems.push(Problem::new(place, number, rule));
    let columns = line.chars().count();
    if columns > COLUMNS_MAX && !line.contains("://") {
        problem(format!("{columns} columns, at most {COLUMNS_MAX} are allowed"));
    }
    if is_ignored_fence(line) {
        problem("an example that is not compiled: `ignore` on a code fence".to_owned());
    }
    problems
}

/// Returns whether a line of a doc comment opens a code fence marked `ignore`.
fn is_ignored_fence(line: &str) -> bool {
    let line = line.trim_start();
    let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
    let fence = doc.and_then(|doc| doc.trim_start().strip_prefix("```"));
    fence.is_some_and(|tags| tags.split([',', ' ']).any(|tag| tag.starts_with("ignore")))
}

fn check_length(place: &str, text: &str) -> Option<Problem> {
    let lines = text.lines().count();
    let listed = LONGER.iter().any(|(path, reason)| *path == place && !reason.is_empty());
    let rule = format!("{lines} lines: split it, or list it with a reason in {}", file!());
    (lines > LINES_MAX && !listed).then(|| Problem::new(place, 0, rule))
}

/// Checks that longer unit tests are in a separate file.
fn check_tests_length(place: &str, text: &str) -> Option<Problem> {
    let lines: Vec<_> = text.lines().collect();
    let start = lines.iter().position(|line| line.trim_end() == "mod tests {")?;
    let length = lines.get(start..)?.iter().position(|line| line.trim_end() == "}")?;
    let rule =
        format!("{length} lines of tests, more than {TEST_LINES_MAX} get a file of their own");
    (length > TEST_LINES_MAX).then(|| Problem::new(place, start + 1, rule))
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
