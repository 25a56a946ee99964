//! An error as one line of text.
use candle_core::Error as CandleError;

/// The causes one after another. candle adds a backtrace to its errors where the environment asks
/// for one; that is left out, a user cannot act on it.
pub(crate) fn describe(error: &anyhow::Error) -> String {
    let causes = error.chain().map(|cause| match cause.downcast_ref::<CandleError>() {
        Some(error) => describe_candle(error),
        None => cause.to_string(),
    });
    one_line(&causes.collect::<Vec<_>>().join(": "))
}

/// The same text on one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn describe_candle(error: &CandleError) -> String {
    match error {
        CandleError::WithBacktrace { inner, .. } => describe_candle(inner),
        CandleError::WithPath { inner, path } => {
            format!("{}: {}", path.display(), describe_candle(inner))
        }
        CandleError::Context { inner, context } => format!("{context}: {}", describe_candle(inner)),
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::Context;

    #[test]
    fn a_backtrace_is_no_part_of_a_message() {
        let error = CandleError::WithBacktrace {
            inner: Box::new(CandleError::Msg("no such\ntensor".to_owned())),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        let error = Err::<(), _>(error).context("model.gguf").expect_err("it is one");
        assert_eq!(describe(&error), "model.gguf: no such tensor");
    }
}
