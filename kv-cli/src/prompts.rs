//! The prompts of a run, from the command line and from a file.
use std::path::Path;

use anyhow::{Context, bail};
use kv_runner::read_text;

/// The default prompt.
const DEFAULT: &str = "Once upon a time";

pub(crate) fn collect(given: &[String], file: Option<&Path>) -> anyhow::Result<Vec<String>> {
    let mut prompts = given.to_vec();
    if let Some(path) = file {
        let text = read_text(path)?;
        prompts.extend(parse(&text).with_context(|| path.display().to_string())?);
        if prompts.is_empty() {
            bail!("{}: no prompts", path.display());
        }
    }
    if prompts.is_empty() {
        prompts.push(DEFAULT.to_owned());
    }
    Ok(prompts)
}

fn parse(text: &str) -> anyhow::Result<Vec<String>> {
    let mut prompts = Vec::new();
    for (number, line) in (1_usize..).zip(text.lines()) {
        if line.trim().is_empty() {
            continue;
        }
        let prompt = if line.starts_with('"') {
            serde_json::from_str(line).with_context(|| format!("line {number}"))?
        } else {
            line.to_owned()
        };
        prompts.push(prompt);
    }
    Ok(prompts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_prompt_or_a_json_string() {
        let prompts = parse("plain \\n\r\n\n\"two\\nlines\"\n\"\"\n  \nlast").expect("prompts");
        assert_eq!(prompts, ["plain \\n", "two\nlines", "", "last"]);
        let error = format!("{:#}", parse("a\n\"open\n").expect_err("not JSON"));
        assert!(error.starts_with("line 2: "), "{error}");
    }

    #[test]
    fn there_is_always_a_prompt() {
        assert_eq!(collect(&[], None).expect("default"), [DEFAULT]);
        assert_eq!(collect(&[String::new()], None).expect("empty"), [""]);
    }
}
