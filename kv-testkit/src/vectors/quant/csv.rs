//! CSV without quotes: a header, then rows with the same number of fields.
//!
//! The crate `csv` would replace one call of `split`: columns by name, a second column of one name
//! and lines in errors would stay here.

/// A table of text.
#[derive(Debug)]
pub(super) struct Table {
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Reads a table of at least one row.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(bytes).map_err(|error| format!("not text: {error}"))?;
        let fields = |line: &str| line.split(',').map(str::to_owned).collect::<Vec<_>>();
        let mut lines = text.lines().zip(1..);
        let columns = lines.next().map(|(line, _)| fields(line)).unwrap_or_default();
        if let Some(twice) =
            columns.iter().enumerate().find(|(i, name)| columns[..*i].contains(name))
        {
            return Err(format!("column {} appears twice", twice.1));
        }
        let mut rows = Vec::new();
        for (line, number) in lines {
            let row = fields(line);
            if row.len() != columns.len() {
                return Err(format!(
                    "line {number} has {} fields, the header {}",
                    row.len(),
                    columns.len()
                ));
            }
            rows.push(row);
        }
        if rows.is_empty() {
            return Err("a table without rows".to_owned());
        }
        Ok(Self { columns, rows })
    }

    /// Returns the header.
    pub(super) fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Reads every field of a column; an error names the line.
    pub(super) fn each<T>(
        &self,
        column: usize,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, String> {
        let field = |(row, line): (&Vec<String>, usize)| {
            read(&row[column])
                .map_err(|why| format!("line {line}, {}: {why}", self.columns[column]))
        };
        self.rows.iter().zip(2..).map(field).collect()
    }
}
