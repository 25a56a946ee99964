//! Arguments of the commands about the accuracy of stored formats.
use std::path::PathBuf;

use clap::Args;
use kv::quant::{FULL_PRECISION_PREFIX, Stored};

use super::{ModelArgs, at_least_1};

/// Measure the accuracy of stored formats: each against f32, on a text that the model reads.
///
/// Teacher forcing: every token of a window of the text is written to the cache, and attends to all
/// tokens before it and to itself in their stored form. The distribution of the next token is
/// compared: its KL divergence from that of an f32 cache (mean and 99th percentile, in nats), how
/// often both have the same most likely token, and the mean negative log-likelihood of the token
/// that follows in the text.
///
/// Formats with given scales (fp8-e4m3, int8-tensor, nvfp4 and others) need --calib or
/// --calib-text.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv eval --text story.txt --format l4 --format int8/l4 --calib-text other.txt
  kv eval --model smollm2.gguf --tokenizer tokenizer.json --text wiki.txt --skip-tokens 4096 \\
    --window 2048 --windows 2 --calib-text book.txt --plot accuracy.svg --json"
)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,

    /// Number of tokens to skip at the start of the text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) skip_tokens: u32,

    /// Tokens per window; each window is read from an empty cache. Default: 512, or the model's
    /// context if that is less
    #[arg(long, value_name = "N", value_parser = at_least_2)]
    pub(crate) window: Option<u32>,

    /// Number of windows, one after another; default: as many as the text holds, at most 8
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) windows: Option<u32>,

    /// Stored format of K and V, such as l4, int8/l4 (K/V) or l4,full-precision-prefix=0; may be
    /// repeated. Default: all but f32, those with given scales only with a calibration
    #[arg(long, value_name = "NAME[,..]")]
    pub(crate) format: Vec<Stored>,

    /// Text to measure calibration constants on; use another text than --text, otherwise the
    /// figures are too good
    #[arg(long, value_name = "FILE", conflicts_with = "calib")]
    pub(crate) calib_text: Option<PathBuf>,

    /// Most tokens of --calib-text to read
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_1)]
    pub(crate) calib_tokens: u32,

    /// Constants that `kv calibrate` wrote for this model
    #[arg(long, value_name = "FILE")]
    pub(crate) calib: Option<PathBuf>,

    /// Store rows without a transform, in every format that does not set transform=on
    #[arg(long)]
    pub(crate) no_transform: bool,

    /// First tokens of a window that stay in 16 bits; default: 4 if rows are transformed, otherwise
    /// 0. A format's own full-precision-prefix= takes precedence
    #[arg(long, value_name = "N")]
    pub(crate) full_precision_prefix: Option<u32>,

    /// Tokens per block: matters only for mean=block and tail=on
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_1)]
    pub(crate) block_size: u32,

    /// Draw divergence against bits per value, one labelled point per format
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON list instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Make calibration constants of quantised storage from a text that the model reads.
///
/// Per layer and kv head: the mean of every channel of K, the balance between K and Q, and the
/// largest magnitudes, from which given scales are made. The file is valid for this model only.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv calibrate --text book.txt -o calib.safetensors
  kv calibrate --model smollm2.gguf --tokenizer tokenizer.json --text book.txt --tokens 4096 \\
    -o smollm2.safetensors"
)]
pub(crate) struct CalibrateArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,

    /// Most tokens of the text to read
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_1)]
    pub(crate) tokens: u32,

    /// First tokens of a sequence to leave out, because the cache will keep them in 16 bits
    #[arg(long, value_name = "N", default_value_t = FULL_PRECISION_PREFIX)]
    pub(crate) full_precision_prefix: u32,

    /// File to write, safetensors
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,

    /// Print one JSON object about the file instead of a line
    #[arg(long)]
    pub(crate) json: bool,
}

fn at_least_2(text: &str) -> Result<u32, String> {
    match at_least_1(text) {
        Ok(1) => Err("at least 2 are needed: a token, and the one that follows".to_owned()),
        number => number,
    }
}
