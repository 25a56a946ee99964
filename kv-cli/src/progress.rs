//! A bar for what takes long, on a terminal only.
use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar over `total` tokens; without a terminal one that is never seen.
pub(crate) fn tokens(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} tokens, {per_sec}, {eta} {msg}")
}

/// A bar over `total` requests; without a terminal one that is never seen.
pub(crate) fn requests(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} requests, {per_sec}, {eta} {msg}")
}

/// A bar over `total` rounds of measuring; without a terminal one that is never seen.
pub(crate) fn rounds(total: u64) -> ProgressBar {
    bar(total, "{bar:40} {pos}/{len} rounds, {eta} {msg}")
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
