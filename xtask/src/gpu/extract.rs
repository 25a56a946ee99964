//! Extracts the important parts of programs' output.
use serde_json::Value;

/// Bytes that are kept of one stage's output, at its beginning and at its end.
const LOG_BYTES: usize = 100_000;

/// Returns the beginning and the end of a long text.
pub(super) fn shortened(text: &str) -> String {
    if text.len() <= LOG_BYTES * 2 {
        return text.to_owned();
    }
    let head = text.floor_char_boundary(LOG_BYTES);
    let tail = text.ceil_char_boundary(text.len().saturating_sub(LOG_BYTES));
    let (head, tail) = (text.get(..head), text.get(tail..));
    format!("{}\n[...]\n{}", head.unwrap_or_default(), tail.unwrap_or_default())
}

/// Formats the counts of a runner of the suite.
pub(super) fn counted(report: &Value) -> Option<String> {
    let count = |key| report.get(key).and_then(Value::as_u64);
    let (passed, failed, skipped) = (count("passed")?, count("failed")?, count("skipped")?);
    Some(format!("{passed} passed, {failed} failed, {skipped} skipped"))
}

/// Returns the summary of the test harness.
pub(super) fn summary(output: &str) -> String {
    let line = output.lines().rev().find(|line| line.starts_with("test result: "));
    line.unwrap_or_default().trim_start_matches("test result: ").to_owned()
}

/// Returns the end of an output, on one line.
pub(super) fn last_lines(output: &str) -> String {
    let lines = output.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    let mut lines: Vec<_> = lines.take(6).collect();
    lines.reverse();
    lines.join(" / ")
}

/// Returns the texts of `kv generate --json`, whose object is one line among others.
pub(super) fn generated(output: &str) -> Option<Vec<String>> {
    let mut records = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let report = records.find(|record| record.get("sequences").is_some())?;
    let sequences = report.get("sequences")?.as_array()?;
    let text = |sequence: &Value| Some(sequence.get("text")?.as_str()?.to_owned());
    sequences.iter().map(text).collect()
}
