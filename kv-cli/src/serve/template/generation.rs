//! `{% generation %}`, which transformers adds to Jinja: its block marks the model's answer, and is
//! rendered as it stands.
//!
//! The engine takes no blocks of its own, so they become `{% with %}`: a block with names of its
//! own, as in transformers. Nothing else of a template is changed.
// Reads templates that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]

/// Replaces the names of these blocks. Comments, raw blocks, texts and everything between tags stay
/// as they are.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag, body)) = next_tag(rest) {
        out.push_str(before);
        out.push_str(tag.opening());
        rest = match tag {
            Tag::Comment => copy(&mut out, body, body.find("#}")),
            Tag::Expression => copy(&mut out, body, end_of(body, "}}")),
            Tag::Statement => statement(&mut out, body),
        };
    }
    out.push_str(rest);
    out
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    Comment,
    Expression,
    Statement,
}

impl Tag {
    fn opening(self) -> &'static str {
        match self {
            Self::Comment => "{#",
            Self::Expression => "{{",
            Self::Statement => "{%",
        }
    }
}

/// Returns the text before the next tag, the tag, and the text after its opening.
fn next_tag(source: &str) -> Option<(&str, Tag, &str)> {
    let tags = [Tag::Comment, Tag::Expression, Tag::Statement];
    let (at, tag) = tags
        .iter()
        .filter_map(|tag| Some((source.find(tag.opening())?, *tag)))
        .min_by_key(|(at, _)| *at)?;
    let (before, rest) = source.split_at_checked(at)?;
    Some((before, tag, rest.strip_prefix(tag.opening())?))
}

/// Copies up to `end`, or all of it if the tag is never closed; returns the rest.
fn copy<'a>(out: &mut String, body: &'a str, end: Option<usize>) -> &'a str {
    let (inside, rest) = body.split_at_checked(end.unwrap_or(body.len())).unwrap_or((body, ""));
    out.push_str(inside);
    rest
}

/// Copies a statement whose opening was copied, under its new name if it is one of ours; returns
/// the text after it.
fn statement<'a>(out: &mut String, body: &'a str) -> &'a str {
    let marks = body.strip_prefix(['-', '+']).unwrap_or(body);
    let blanks = marks.trim_start();
    let length = blanks.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(blanks.len());
    let (name, after) = blanks.split_at_checked(length).unwrap_or((blanks, ""));
    let is_alone = ["%}", "-%}", "+%}"].iter().any(|end| after.trim_start().starts_with(end));
    let opening = body.strip_suffix(blanks).unwrap_or_default();
    match name {
        "generation" | "endgeneration" if is_alone => {
            out.push_str(opening);
            out.push_str(if name == "generation" { "with" } else { "endwith" });
            after
        }
        "raw" if is_alone => copy(out, body, end_of_raw(body)),
        _ => copy(out, body, end_of(body, "%}")),
    }
}

/// Returns where the tag that ends a raw block begins.
fn end_of_raw(body: &str) -> Option<usize> {
    let is_end = |at: usize| {
        let tag = body.get(at..).and_then(|tag| tag.strip_prefix("{%")).unwrap_or_default();
        let name = tag.strip_prefix(['-', '+']).unwrap_or(tag).trim_start();
        let after = name.strip_prefix("endraw").map(str::trim_start);
        after.is_some_and(|after| ["%}", "-%}", "+%}"].iter().any(|end| after.starts_with(end)))
    };
    body.match_indices("{%").map(|(at, _)| at).find(|at| is_end(*at))
}

/// Returns where a tag ends: texts and brackets inside it may have the same characters.
fn end_of(body: &str, end: &str) -> Option<usize> {
    let (mut text, mut is_escaped, mut depth) = (None, false, 0_usize);
    for (at, character) in body.char_indices() {
        if let Some(quote) = text {
            match character {
                _ if is_escaped => is_escaped = false,
                '\\' => is_escaped = true,
                _ if character == quote => text = None,
                _ => {}
            }
            continue;
        }
        if depth == 0 && body.get(at..).is_some_and(|rest| rest.starts_with(end)) {
            return Some(at);
        }
        match character {
            '"' | '\'' => text = Some(character),
            '(' | '[' | '{' => depth = depth.saturating_add(1),
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_this_name_become_blocks_with_names_of_their_own() {
        for (source, expected) in [
            ("{% generation %}x{% endgeneration %}", "{% with %}x{% endwith %}"),
            ("{%- generation -%}x{%+endgeneration+%}", "{%- with -%}x{%+endwith+%}"),
            ("{%\n generation\t%}", "{%\n with\t%}"),
            ("{{ '{% generation %}' }}{% generation %}", "{{ '{% generation %}' }}{% with %}"),
            ("{{ {'a': {'}}': 1}} }}{% generation %}", "{{ {'a': {'}}': 1}} }}{% with %}"),
            ("{% if a == '%}\\'' %}{% generation %}", "{% if a == '%}\\'' %}{% with %}"),
            ("{# {% raw %} #}{% generation %}", "{# {% raw %} #}{% with %}"),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }

    #[test]
    fn everything_else_stays() {
        for source in [
            "",
            "generation {generation} {",
            "{% set generation = 1 %}{{ generation }}",
            "{% generations %}{% generation x %}{% endgenerations %}",
            "{# {% generation %} #}",
            "{% raw %}{% generation %}{# {% endraw2 %}{%- endraw -%}",
            "{%- raw +%}{{ '{% endgeneration %}{% endraw %}",
            "{{ \"{% generation %}\\\"{% generation %}\" }}",
            "{% raw %}{% generation %}",
            "{# {% generation %}",
            "{{ '{% generation %}",
            "{% if '{% generation %}",
            "{%",
            "{{",
            "{%-",
            "caf\u{e9} {{ '\u{1f600}%}' }} {% x '\u{e9}",
        ] {
            assert_eq!(rewrite(source), source);
        }
    }
}
