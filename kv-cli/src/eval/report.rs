//! The output of `kv eval`, as JSON and as text.
use kv::CacheSpec;
use kv::quant::bits_per_value;
use serde::Serialize;

use super::metrics::Summary;
use crate::args::EvalArgs;
use crate::chart::{Axis, Chart, Mark, Series};
use crate::loaded::Loaded;
use crate::output;

/// One element of the list that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    pub(super) format: String,
    /// With scales and block means; the mean of K and V.
    pub(super) bits_per_value: f64,
    /// Divergence of the next token's distribution from that of f32, in nats.
    pub(super) kld_mean: f64,
    pub(super) kld_p99: f64,
    /// Share of the tokens after which f32 has the same most likely token.
    pub(super) top1: f64,
    /// Mean negative log-likelihood minus that of f32, in nats.
    pub(super) delta_nll: f64,
    pub(super) ppl: f64,
    /// Predicted tokens.
    pub(super) tokens: usize,
}

impl Line {
    pub(super) fn new(format: String, spec: &CacheSpec, summary: &Summary) -> Self {
        let Summary { kld_mean, kld_p99, top1, delta_nll, ppl, tokens } = *summary;
        let bits_per_value = bits_per_value(spec);
        Self { format, bits_per_value, kld_mean, kld_p99, top1, delta_nll, ppl, tokens }
    }
}

/// The whole report.
pub(super) struct Report<'r> {
    pub(super) args: &'r EvalArgs,
    pub(super) loaded: &'r Loaded,
    pub(super) windows: &'r [&'r [u32]],
    /// The source of the constants.
    pub(super) constants: String,
    /// Lines with the bytes per token over all layers.
    pub(super) lines: Vec<(Line, u64)>,
}

impl Report<'_> {
    pub(super) fn print(&self) -> anyhow::Result<()> {
        if self.args.json {
            let lines: Vec<_> = self.lines.iter().map(|(line, _)| line).collect();
            return output::json(&lines);
        }
        output::text(&self.show())
    }

    /// Charts divergence against bits per value.
    pub(super) fn chart(&self) -> Chart {
        let points = self
            .lines
            .iter()
            .map(|(line, _)| (line.format.clone(), (line.bits_per_value, line.kld_mean)));
        Chart {
            title: "KL divergence from an f32 cache",
            x: Axis::Linear("stored bits per value, scales included"),
            y: Axis::Log("mean KL divergence, nats"),
            series: Series::by_name(Mark::Named, points),
        }
    }

    fn show(&self) -> String {
        let Self { args, loaded, windows, constants, lines } = self;
        let window = windows.first().map_or(0, |window| window.len());
        // Equal for every format, except for rounding of the last digits.
        let plain =
            lines.first().map_or(f64::NAN, |(line, _)| (line.ppl.ln() - line.delta_nll).exp());
        let plural = if windows.len() == 1 { "" } else { "s" };
        format!(
            "{} on {}, {} window{plural} of {window} tokens of {} after {}, blocks of {}, \
             {constants}\n\
             f32: perplexity {plain:.4}; divergence from it, nats per token:\n{}",
            loaded.name,
            args.model.backend,
            windows.len(),
            args.text.display(),
            args.skip_tokens,
            args.block_size,
            output::table(&self.table())
        )
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heading = [
            "format",
            "bits/value",
            "bytes/token",
            "KLD",
            "KLD p99",
            "top-1",
            "delta nll",
            "perplexity",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|(line, bytes_per_token)| {
            vec![
                line.format.clone(),
                format!("{:.3}", line.bits_per_value),
                bytes_per_token.to_string(),
                format!("{:.6}", line.kld_mean),
                format!("{:.5}", line.kld_p99),
                format!("{:.2} %", line.top1 * 100.0),
                format!("{:+.5}", line.delta_nll),
                format!("{:.4}", line.ppl),
            ]
        }));
        rows
    }
}
