//! Arguments of the commands that ask what stored formats cost in accuracy.
use std::path::PathBuf;

use clap::Args;
use kv::Device;
use kv_runner::stored::{FULL_PRECISION_PREFIX, Stored};

use super::{at_least_1, backend};

/// Measure what stored formats cost in accuracy: each against f32, on a text the model reads.
///
/// Teacher forcing: every token of a window of the text is written to the cache, and attends to all
/// tokens before it and to itself as they are stored. What is compared is the distribution of the
/// next token: its KL divergence from that of an f32 cache (mean and 99th percentile, in nats), how
/// often both have the same most likely token, and the mean negative log-likelihood of the token
/// that does follow.
///
/// Formats whose scales must be given (fp8-e4m3, int8-tensor, nvfp4 and others) need --calib or
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
    /// Model directory or .gguf file; the bundled stories260K unless given
    #[arg(long, value_name = "DIR|FILE.gguf")]
    pub(crate) model: Option<PathBuf>,

    /// A tokenizer.json, for a .gguf file that has none beside it
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,

    /// Tokens at the start of the text that are left out
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) skip_tokens: u32,

    /// Tokens of a window; each window is read from an empty cache. 512 unless given, or the
    /// model's context if that is less
    #[arg(long, value_name = "N", value_parser = at_least_2)]
    pub(crate) window: Option<u32>,

    /// Windows, one after another; as many as the text holds, 8 at most, unless given
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) windows: Option<u32>,

    /// Stored format of K and V, such as l4, int8/l4 (K/V) or l4,full-precision-prefix=0; may be
    /// repeated. Unless given all but f32, those with given scales only where there is a
    /// calibration
    #[arg(long, value_name = "NAME[,..]")]
    pub(crate) format: Vec<Stored>,

    /// Text to make the constants of the transform and the given scales from; another one than
    /// --text, or the figures flatter
    #[arg(long, value_name = "FILE", conflicts_with = "calib")]
    pub(crate) calib_text: Option<PathBuf>,

    /// Tokens of --calib-text that are read, at most
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_1)]
    pub(crate) calib_tokens: u32,

    /// Constants that `kv calibrate` wrote for this model
    #[arg(long, value_name = "FILE")]
    pub(crate) calib: Option<PathBuf>,

    /// Store rows as they are, in every format that does not say transform=on
    #[arg(long)]
    pub(crate) no_transform: bool,

    /// First tokens of a window that stay in 16 bits; 4 where rows are transformed and 0 elsewhere
    /// unless given, here or with a format
    #[arg(long, value_name = "N")]
    pub(crate) full_precision_prefix: Option<u32>,

    /// Tokens of a block: only mean=block and tail=on depend on it
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_1)]
    pub(crate) block_size: u32,

    /// Where the caches live: a name that `kv devices` lists, such as cpu,
    /// wgpu:0, wgpu:llvmpipe (a part of an adapter's name) or cuda:0
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: Device,

    /// Draw divergence against bits per value, one labelled point a format
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON list instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Make the constants of quantised storage from a text that the model reads.
///
/// Per layer and kv head: the mean of every channel of K, the balance between K and Q, and the
/// largest magnitudes that given scales are made from. The file is for this model alone.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv calibrate --text book.txt -o calib.safetensors
  kv calibrate --model smollm2.gguf --tokenizer tokenizer.json --text book.txt --tokens 4096 \\
    -o smollm2.safetensors"
)]
pub(crate) struct CalibrateArgs {
    /// Model directory or .gguf file; the bundled stories260K unless given
    #[arg(long, value_name = "DIR|FILE.gguf")]
    pub(crate) model: Option<PathBuf>,

    /// A tokenizer.json, for a .gguf file that has none beside it
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,

    /// Tokens of the text that are read, at most
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_1)]
    pub(crate) tokens: u32,

    /// First tokens of a sequence that do not count, because the cache will keep them in 16 bits
    #[arg(long, value_name = "N", default_value_t = FULL_PRECISION_PREFIX)]
    pub(crate) full_precision_prefix: u32,

    /// File to write, safetensors
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,

    /// Where the cache lives that the model reads with: a name that `kv devices` lists,
    /// such as wgpu:0 or cuda:0
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: Device,

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
