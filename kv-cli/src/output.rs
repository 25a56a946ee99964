//! Standard output. If its reader is gone, the program ends quietly; any other failure is reported.
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, bail};
use serde::Serialize;

/// The reader of standard output has closed it: nothing is left to do.
#[derive(Debug, thiserror::Error)]
#[error("standard output is closed")]
pub(crate) struct OutputClosed;

/// Writes text and flushes it.
pub(crate) fn text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(check)
}

/// Writes one JSON value and a line break.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<()> {
    text(&format!("{}\n", serde_json::to_string(value)?))
}

/// Writes a line to standard error, for information that is not part of the result.
pub(crate) fn note(line: &str) -> anyhow::Result<()> {
    writeln!(io::stderr().lock(), "kv: {line}").context("standard error")
}

fn check(error: io::Error) -> anyhow::Error {
    if error.kind() == io::ErrorKind::BrokenPipe {
        return OutputClosed.into();
    }
    anyhow::Error::new(error).context("standard output")
}

/// Refuses a file in a missing folder, before the work whose result it would hold.
pub(crate) fn check_writable(path: &Path) -> anyhow::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    if path.is_dir() || parent.is_some_and(|parent| !parent.is_dir()) {
        bail!("{}: not a file in a folder that exists", path.display());
    }
    Ok(())
}

/// Formats rows of cells as a table, the first column aligned left and the others right.
pub(crate) fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let width = |column: usize| rows.iter().map(|row| cell(row, column).chars().count()).max();
    let widths: Vec<_> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    let mut table = String::new();
    for row in rows {
        let cells = widths.iter().enumerate().map(|(column, width)| match cell(row, column) {
            first if column == 0 => format!("{first:<width$}"),
            cell => format!("  {cell:>width$}"),
        });
        table.push_str(cells.collect::<String>().trim_end());
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows =
            [vec!["name".to_owned(), "n".to_owned()], vec!["x".to_owned(), "100".to_owned()]];
        assert_eq!(table(&rows), "name    n\nx     100\n");
    }
}
