//! Progress bars, on a terminal only.
use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kv::backend::AnyBackend;
use kv::quant::calibrate::Calibrator;
use kv_runner::{Decoder, Error, calibrate};

use crate::num::to_u64;

/// Makes a bar over `total` tokens; hidden without a terminal.
pub(crate) fn tokens(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} tokens, {per_sec}, {eta} {msg}")
}

/// Makes a bar over `total` requests; hidden without a terminal.
pub(crate) fn requests(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} requests, {per_sec}, {eta} {msg}")
}

/// Makes a bar over `total` rounds of a measurement; hidden without a terminal.
pub(crate) fn rounds(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} rounds, {eta} {msg}")
}

/// Runs [`calibrate::observe`] with a bar.
pub(crate) fn calibrate(
    model: &Decoder,
    backend: &AnyBackend,
    ids: &[u32],
    prefixes: &[u32],
) -> Result<Vec<Calibrator>, Error> {
    let bar = tokens(to_u64(ids.len())).with_message("calibration");
    let mut inc = |read| bar.inc(to_u64(read));
    let calibrators = calibrate::observe(model, backend, ids, prefixes, &mut inc)?;
    bar.finish_and_clear();
    Ok(calibrators)
}

fn bar(total: u64, template: &str) -> ProgressBar {
    let target = if std::io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let style = ProgressStyle::with_template(template);
    ProgressBar::with_draw_target(Some(total), target)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
