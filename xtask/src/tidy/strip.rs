//! Reduces Rust source to its code: comments and the text of literals become blanks.
//!
//! Lines stay where they are. This is no parser: it knows just enough of the lexical structure not
//! to take a word in a string for a keyword.

/// The code of a source text, every other character a blank.
pub(super) fn code(source: &str) -> String {
    let mut scanner = Scanner { rest: source, out: String::with_capacity(source.len()) };
    while !scanner.rest.is_empty() {
        scanner.step();
    }
    scanner.out
}

struct Scanner<'s> {
    rest: &'s str,
    out: String,
}

impl Scanner<'_> {
    /// Consumes one comment, literal, word or other character.
    fn step(&mut self) {
        let rest = self.rest;
        if rest.starts_with("//") {
            self.blank(rest.find('\n').unwrap_or(rest.len()));
        } else if rest.starts_with("/*") {
            self.blank(block_comment(rest));
        } else if let Some(len) = raw_string(rest) {
            self.blank(len);
        } else if let Some(quoted) = rest.strip_prefix('"').or_else(|| rest.strip_prefix("b\"")) {
            let prefix = rest.len().saturating_sub(quoted.len());
            self.blank(prefix.saturating_add(closing(quoted, '"')));
        } else if let Some(len) = char_literal(rest) {
            self.blank(len);
        } else {
            // A whole word at once, so that the `r` of `for"` is not taken for a raw string's.
            let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            self.keep(if word == 0 { first_len(rest) } else { word });
        }
    }

    fn keep(&mut self, len: usize) {
        let (kept, rest) = self.rest.split_at(len);
        self.out.push_str(kept);
        self.rest = rest;
    }

    fn blank(&mut self, len: usize) {
        let (gone, rest) = self.rest.split_at(len);
        self.out.extend(gone.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
        self.rest = rest;
    }
}

fn first_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

/// Length of a block comment, nested ones included.
fn block_comment(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0_usize;
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        let opens = rest.starts_with("/*");
        let closes = rest.starts_with("*/");
        let len = if opens || closes { 2 } else { first_len(rest) };
        at = at.saturating_add(len);
        depth = depth.saturating_add(usize::from(opens)).saturating_sub(usize::from(closes));
        if closes && depth == 0 {
            break;
        }
    }
    at
}

/// Length of a raw string literal at the start of `text`.
fn raw_string(text: &str) -> Option<usize> {
    let after = text.strip_prefix("br").or_else(|| text.strip_prefix('r'))?;
    let body = after.trim_start_matches('#');
    let hashes = after.len().saturating_sub(body.len());
    let body = body.strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    let len = body.find(&end).map_or(body.len(), |at| at.saturating_add(end.len()));
    Some(text.len().saturating_sub(body.len()).saturating_add(len))
}

/// Length up to and including the closing quote, escapes skipped.
fn closing(body: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at.saturating_add(1),
            _ => {}
        }
    }
    body.len()
}

/// Length of a character or byte literal; `None` for a lifetime.
fn char_literal(text: &str) -> Option<usize> {
    let body = text.strip_prefix('\'').or_else(|| text.strip_prefix("b'"))?;
    let prefix = text.len().saturating_sub(body.len());
    let is_escape = body.starts_with('\\');
    let second = body.get(first_len(body)..)?;
    let is_char = is_escape || (second.starts_with('\'') && !body.starts_with('\''));
    is_char.then(|| prefix.saturating_add(closing(body, '\'')))
}

#[cfg(test)]
mod tests {
    use super::code;

    #[track_caller]
    fn check(source: &str, expected: &str) {
        let squeezed: Vec<_> = code(source).split_whitespace().map(str::to_owned).collect();
        assert_eq!(squeezed.join(" "), expected);
        assert_eq!(code(source).lines().count(), source.lines().count());
    }

    #[test]
    fn comments_go() {
        check("a // b\nc", "a c");
        check("a /* b /* c */ d\n */ e", "a e");
        check("/// unsafe\nfn f() {}", "fn f() {}");
    }

    #[test]
    fn literals_go() {
        check(r#"f("unsafe \" {", b"x") + 1"#, "f( , ) + 1");
        check("f(r#\"a \" b\"#, br\"c\") + 1", "f( , ) + 1");
        check("for\"x\"", "for");
        check(r"['\'', 'a', b'\n', '∞']", "[ , , , ]");
    }

    #[test]
    fn lifetimes_stay() {
        check(
            "fn f<'a>(x: &'a str, c: char) -> &'a str",
            "fn f<'a>(x: &'a str, c: char) -> &'a str",
        );
    }

    #[test]
    fn unclosed_literals_end_with_the_text() {
        check("a \"b", "a");
        check("a /* b", "a");
        check("a r#\"b", "a");
    }
}
