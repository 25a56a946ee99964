//! An error as one line of text.
use std::error::Error;

/// Joins the messages of an error and its causes.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    chain(error.as_ref())
}

/// Does the same for an error of any type.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    one_line(&text)
}

/// Replaces line breaks by spaces.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::{Context, anyhow};

    #[test]
    fn an_error_and_its_causes_are_one_line() {
        let error = Err::<(), _>(anyhow!("no such\ntensor")).context("model.gguf");
        assert_eq!(describe(&error.expect_err("it is one")), "model.gguf: no such tensor");
    }
}
