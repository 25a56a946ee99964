//! `cargo xtask tidy --fix`: breaks comments anew where a line is too long.
//!
//! rustfmt leaves comments alone. Only a paragraph with a line that is too long changes, from that
//! line on; tables, code and links stay as they are.

/// The text with every overlong comment line broken at `columns`.
pub(super) fn wrap(text: &str, columns: usize) -> String {
    let mut out = String::with_capacity(text.len());
    let mut lines = text.lines().peekable();
    let mut in_fence = false;
    while let Some(line) = lines.next() {
        let comment = Comment::parse(line);
        in_fence = match comment {
            Some(comment) => in_fence != comment.text.trim_start().starts_with("```"),
            None => false,
        };
        match comment.filter(|c| !in_fence && line.chars().count() > columns && c.is_prose()) {
            None => push_line(&mut out, line),
            Some(first) => {
                let mut words: Vec<&str> = first.body().split(' ').collect();
                while let Some(next) = lines.peek().and_then(|next| first.continued_by(next)) {
                    words.extend(next.split(' '));
                    lines.next();
                }
                first.fill(&words, columns, &mut out);
            }
        }
    }
    out
}

fn push_line(out: &mut String, line: &str) {
    out.push_str(line);
    out.push('\n');
}

/// One line that is nothing but a comment.
#[derive(Clone, Copy)]
struct Comment<'t> {
    /// Indent and slashes.
    prefix: &'t str,
    text: &'t str,
}

impl<'t> Comment<'t> {
    fn parse(line: &'t str) -> Option<Self> {
        let code = line.trim_start();
        let indent = line.len().saturating_sub(code.len());
        let mark = ["///", "//!", "//"].into_iter().find(|mark| code.starts_with(mark))?;
        let (prefix, text) = line.split_at_checked(indent.saturating_add(mark.len()))?;
        Some(Self { prefix, text: text.strip_prefix(' ').unwrap_or(text) })
    }

    /// Whether its words may move.
    fn is_prose(&self) -> bool {
        let is_code = self.text.starts_with("    ");
        !self.text.starts_with('|') && !self.text.contains("://") && !is_code
    }

    /// The blanks that continue a list item, as many as its marker has characters.
    fn marker(&self) -> &'t str {
        let text = self.text.trim_start();
        let digits = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let is_number = digits.len() < text.len();
        let bullet = || text.strip_prefix("- ").or_else(|| text.strip_prefix("* "));
        let after = if is_number { digits.strip_prefix(". ") } else { bullet() };
        let body = after.unwrap_or(text);
        self.text.get(..self.text.len().saturating_sub(body.len())).unwrap_or_default()
    }

    fn body(&self) -> &'t str {
        self.text.strip_prefix(self.marker()).unwrap_or(self.text)
    }

    /// The words of `line` when it goes on with this comment's paragraph.
    fn continued_by(&self, line: &'t str) -> Option<&'t str> {
        let next = Self::parse(line).filter(|next| next.prefix == self.prefix)?;
        let hang = self.marker().len();
        let blanks = next.text.len().saturating_sub(next.text.trim_start().len());
        let starts = ["|", "#", "```", "["].iter().any(|start| next.body().starts_with(start));
        let goes_on = blanks == hang && next.marker().trim().is_empty() && !starts;
        (goes_on && !next.text.is_empty() && next.is_prose()).then(|| next.text.trim_start())
    }

    fn fill(&self, words: &[&str], columns: usize, out: &mut String) {
        let mut line = format!("{} {}", self.prefix, self.marker());
        let hang = format!("{} {}", self.prefix, " ".repeat(self.marker().len()));
        let mut is_empty = true;
        for word in words {
            let width = line.chars().count().saturating_add(word.chars().count());
            if !is_empty && width >= columns {
                push_line(out, &line);
                line.clone_from(&hang);
                is_empty = true;
            }
            if !is_empty {
                line.push(' ');
            }
            line.push_str(word);
            is_empty = false;
        }
        push_line(out, &line);
    }
}

#[cfg(test)]
mod tests {
    use super::wrap;

    #[track_caller]
    fn check(text: &str, expected: &str) {
        assert_eq!(wrap(text, 20), expected);
        assert_eq!(wrap(expected, 20), expected, "nothing is left to do");
    }

    #[test]
    fn a_paragraph_flows_on() {
        check(
            "/// One two three four\n/// five six.\n///\n/// Seven.\nfn f() {}\n",
            "/// One two three\n/// four five six.\n///\n/// Seven.\nfn f() {}\n",
        );
        check("    // aaaa bbbb cccc d\n    x();\n", "    // aaaa bbbb\n    // cccc d\n    x();\n");
    }

    #[test]
    fn lines_that_fit_stay() {
        check("// a\n// b\n// exactly 20 chars.\n", "// a\n// b\n// exactly 20 chars.\n");
    }

    #[test]
    fn list_items_hang() {
        check(
            "/// - aaaa bbbb cccc dddd\n///   eeee\n/// - ffff\n",
            "/// - aaaa bbbb cccc\n///   dddd eeee\n/// - ffff\n",
        );
        check("//! 1. aaaa bbbb cccc\n//! 2. b\n", "//! 1. aaaa bbbb\n//!    cccc\n//! 2. b\n");
    }

    #[test]
    fn tables_code_and_links_stay() {
        for text in [
            "/// | aaaaaaaa | bbbbbbbbb |\n",
            "/// ```\n/// let aaaaaaaaaa = bbbbbb;\n/// ```\n",
            "// see https://example.org/aaaaaaaaa\n",
            "fn f() {} // a comment behind code\n",
            "/// aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\n",
        ] {
            check(text, text);
        }
    }
}
