//! Rules about one document: resolved links, compiled examples, whole tables.
use super::Problem;

/// Checks a document; `exists` tests the target of a relative link.
pub(super) fn check(place: &str, text: &str, exists: impl Fn(&str) -> bool) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut in_fence = false;
    // Columns of the table that the line above belongs to.
    let mut columns = None;
    for (number, line) in (1..).zip(text.lines()) {
        if let Some(tags) = line.trim_start().strip_prefix("```") {
            in_fence = !in_fence;
            if in_fence && tags.split([',', ' ']).any(|tag| tag.starts_with("ignore")) {
                problems.push(Problem::new(place, number, "an example that is not compiled"));
            }
            continue;
        }
        if in_fence {
            continue;
        }
        let cells = line.starts_with('|').then(|| cells(line));
        if let (Some(cells), Some(columns)) = (cells, columns)
            && cells != columns
        {
            let rule = format!("a row of {cells} cells in a table of {columns} columns");
            problems.push(Problem::new(place, number, rule));
        }
        columns = cells.and(columns.or(cells));
        for link in links(line).filter(|link| !exists(link)) {
            let rule = format!("link to {link}, which does not exist");
            problems.push(Problem::new(place, number, rule));
        }
    }
    if in_fence {
        problems.push(Problem::new(place, 0, "a code fence is not closed"));
    }
    problems
}

/// Counts the cells of a table's row; a `|` in code or after a backslash separates none.
fn cells(row: &str) -> usize {
    let (mut bars, mut in_code, mut is_escaped) = (0_usize, false, false);
    for letter in row.trim_end().chars() {
        match letter {
            '`' => in_code = !in_code,
            '|' if !(in_code || is_escaped) => bars += 1,
            _ => {}
        }
        is_escaped = letter == '\\';
    }
    bars.saturating_sub(1)
}

/// Returns the targets of inline links to files, without the fragment.
fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| {
        let target = rest.split([')', ' ']).next()?;
        let file = target.split('#').next()?;
        let is_file = !file.is_empty() && !target.contains("://") && !target.starts_with("mailto:");
        is_file.then_some(file)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(text: &str) -> usize {
        check("a.md", text, |link| link == "docs/b.md").len()
    }

    #[test]
    fn links_to_files_resolve() {
        assert_eq!(problems("see [b](docs/b.md) and [part](docs/b.md#part)\n"), 0);
        assert_eq!(problems("[web](https://example.org/x) [here](#part) [m](mailto:a@b)\n"), 0);
        assert_eq!(problems("[c](docs/c.md), [d](d.md)\n"), 2);
    }

    #[test]
    fn rows_of_a_table_have_its_columns() {
        assert_eq!(problems("| a | b |\n|---|---|\n| `x|y` | z\\|w |\n\n| c |\n|---|\n"), 0);
        assert_eq!(problems("| a | b |\n|---|---|\n| 1 | 2 | | 3 | 4 |\n| 5 |\n"), 2);
    }

    #[test]
    fn fences_are_compiled_and_closed() {
        assert_eq!(problems("```sh\n[c](docs/c.md)\n```\n"), 0);
        assert_eq!(problems("```rust,ignore\nx\n```\n"), 1);
        assert_eq!(problems("```rust\nx\n"), 1);
    }
}
