//! The command line: every name and number is parsed into its type here, once.
mod accuracy;
mod bench;
mod engine;
#[cfg(feature = "serve")]
mod events;
mod fleet;
#[cfg(feature = "serve")]
mod load;
mod plan;
mod replay;
#[cfg(feature = "serve")]
mod serve;
mod states;
mod tier;

use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand};
use kv::Device;
use kv::quant::Source;

pub(crate) use self::accuracy::{CalibrateArgs, EvalArgs};
pub(crate) use self::bench::BenchArgs;
pub(crate) use self::engine::{EngineArgs, ModelArgs, Paged};
#[cfg(feature = "serve")]
pub(crate) use self::events::EventsArgs;
#[cfg(feature = "serve")]
pub(crate) use self::load::LoadArgs;
pub(crate) use self::plan::{PlanArgs, StateSettings};
pub(crate) use self::replay::ReplayArgs;
#[cfg(feature = "serve")]
pub(crate) use self::serve::ServeArgs;
pub(crate) use self::states::type_name;
pub(crate) use self::tier::{
    LsArgs, RmArgs, RootDigits, StatArgs, TierArgs, TierCommand, VerifyArgs,
};

/// Generate text with a KV cache, plan its memory, and measure the accuracy of its formats, the
/// savings of reuse and the speed of a device.
#[derive(Debug, Parser)]
#[command(name = "kv", version, arg_required_else_help = true, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Generate(GenerateArgs),
    #[cfg(feature = "serve")]
    Serve(ServeArgs),
    #[cfg(feature = "serve")]
    Load(LoadArgs),
    Plan(PlanArgs),
    Replay(ReplayArgs),
    Eval(EvalArgs),
    Calibrate(CalibrateArgs),
    Bench(BenchArgs),
    Tier(TierArgs),
    Devices(DevicesArgs),
}

/// Continue prompts with a language model, all of them in one continuous batch.
///
/// Architectures: llama, mistral, qwen2, qwen3, phi3, olmo2, granite and smollm3; with recurrent
/// states `qwen3_5`, `qwen3_next`, lfm2 and granitemoehybrid; rope types: default, linear, dynamic,
/// yarn, llama3, and longrope up to the original context.
///
/// The model runs on the CPU in f32 (f16 and bf16 weights are converted when they are read); its
/// keys and values are in the cache of the chosen backend. A sequence ends after --max-new-tokens,
/// at an end-of-text token, or when it fills the model's context.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv generate --prompt 'Once upon a time'
  kv generate --prompts prompts.txt --max-batch 16 --paged 16,256 --json
  kv generate --compare --max-new-tokens 256
  kv generate --prompts chats.txt --no-reuse
  kv generate --beams 4 --length-penalty 0.8 --prompt 'Lily and Ben'
  kv generate --draft-tokens 6 --paged 8,128
  kv generate --format l4,calib=calib.safetensors
  kv generate --tier host=2GiB --tier disk=cache:20GiB --prompts chats.txt
  kv generate --tier redis://127.0.0.1 --wait 200ms
  kv generate --session chat.kvs --prompt 'One day, Lily'
  kv generate --model smollm2.gguf --tokenizer tokenizer.json --temperature 0.8 --seed 7"
)]
#[expect(clippy::struct_excessive_bools, reason = "one flag of the command line each")]
pub(crate) struct GenerateArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Text to continue, may be repeated; default: "Once upon a time"
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Vec<String>,

    /// File with one prompt per line; a line that starts with `"` is a JSON string, empty lines are
    /// skipped
    #[arg(long, value_name = "FILE")]
    pub(crate) prompts: Option<PathBuf>,

    /// Tokens to generate per prompt
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_1)]
    pub(crate) max_new_tokens: u32,

    /// 0 takes the most likely token, 1 samples from the model's own distribution
    #[arg(long, value_name = "T", default_value = "0", value_parser = temperature)]
    pub(crate) temperature: f64,

    /// Seed of the sampling; each prompt has its own stream, whatever the batch. Logits of a prompt
    /// that is cached, or beside others, may differ in their last bits, and then rarely a draw
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Continue after an end-of-text token. Without this such a token ends its sequence: it is the
    /// last of `tokens` and not part of `text`
    #[arg(long)]
    pub(crate) ignore_eos: bool,

    /// One block per sequence of the batch, as long as the model's context
    #[arg(long, conflicts_with_all = ["paged", "tier"])]
    pub(crate) contiguous: bool,

    /// Recompute every token for each new one, to measure what caching saves
    #[arg(long, conflicts_with = "tier")]
    pub(crate) no_cache: bool,

    /// Compute every prompt whole. Without this a prompt reuses the longest cached prefix of the
    /// others, and prompts that arrive together compute their common prefix once
    #[arg(long, conflicts_with = "tier")]
    pub(crate) no_reuse: bool,

    /// Beam search: continue the N most likely texts at once, as forks that share their blocks,
    /// until N texts have ended or have --max-new-tokens tokens; the best one is printed, all are
    /// in the JSON object. Without sampling (--temperature) and drafts (--draft-tokens)
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_1)]
    pub(crate) beams: u32,

    /// With --beams: texts are ranked by log-probability / length^A; above 1 favours long ones
    #[arg(long, value_name = "A", default_value = "1", value_parser = finite)]
    pub(crate) length_penalty: f64,

    /// Draft up to N next tokens of each sequence from its own text (what followed its last n-gram
    /// before) and verify them all in one step. The text stays the same, with --temperature too; in
    /// formats of few bits a close call may turn out differently, as it may in a batch of another
    /// size
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) draft_tokens: u32,

    /// Keep the text and its cached blocks in FILE. If it is there, the text in it goes on, with
    /// --prompt after it if given, and nothing of it is computed again; the file is replaced at the
    /// end
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = ["no_cache", "contiguous", "no_reuse", "prompts", "compare"])]
    pub(crate) session: Option<PathBuf>,

    /// Run paged, contiguous and uncached at several lengths, then a second request after a long
    /// system prompt with and without reuse, and print the figures; tokens after an end of text are
    /// generated too, so that all runs do the same work
    #[arg(long, conflicts_with_all = ["no_cache", "contiguous", "no_reuse"])]
    pub(crate) compare: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// List the devices that a cache can use: the CPU, the adapters of WebGPU, the cards of CUDA.
///
/// A kind of device without any is listed with the reason. The name in the first column is what
/// --backend takes; a part of an adapter's name works too, as in wgpu:llvmpipe.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kv devices
  kv devices --json")]
pub(crate) struct DevicesArgs {
    /// Print one JSON object instead of a list
    #[arg(long)]
    pub(crate) json: bool,
}

fn at_least_1(text: &str) -> Result<u32, String> {
    match text.parse::<u32>() {
        Ok(0) => Err("at least 1 is needed".to_owned()),
        Ok(n) => Ok(n),
        Err(error) => Err(error.to_string()),
    }
}

impl Cli {
    /// Refuses options that contradict each other, depending on their values.
    pub(crate) fn checked(self) -> Result<Self, clap::Error> {
        let args = match &self.command {
            Command::Generate(args) => args,
            Command::Bench(args) => {
                return match args.check() {
                    Ok(()) => Ok(self),
                    Err(error) => Err(Self::command().error(ErrorKind::ValueValidation, error)),
                };
            }
            Command::Replay(args) => {
                return match args.check() {
                    Ok(()) => Ok(self),
                    Err(error) => Err(Self::command().error(ErrorKind::ValueValidation, error)),
                };
            }
            _ => return Ok(self),
        };
        let (has_beams, has_drafts) = (args.beams > 1, args.draft_tokens > 0);
        let conflict = [
            (has_beams && args.temperature > 0.0, "--beams", "--temperature"),
            (has_beams && has_drafts, "--beams", "--draft-tokens"),
            (has_beams && args.compare, "--beams", "--compare"),
            (has_drafts && args.compare, "--draft-tokens", "--compare"),
            (has_drafts && args.no_cache, "--draft-tokens", "--no-cache"),
            (args.session.is_some() && args.prompt.len() > 1, "--session", "a second --prompt"),
        ];
        if args.session.is_some() && args.engine.format.calibration == Some(Source::Online) {
            // The next run would measure other constants, and could not read the file.
            let message = "the argument '--session' cannot be used with 'calib=online', whose \
                           constants end with the run: `kv calibrate` writes a file for calib=FILE";
            return Err(Self::command().error(ErrorKind::ArgumentConflict, message));
        }
        match conflict.into_iter().find(|(is_there, ..)| *is_there) {
            None => Ok(self),
            Some((_, one, other)) => {
                let message = format!("the argument '{one}' cannot be used with '{other}'");
                Err(Self::command().error(ErrorKind::ArgumentConflict, message))
            }
        }
    }
}

fn finite(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        Ok(_) => Err("a finite number is needed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

/// Parses a time above 0.
#[cfg(feature = "serve")]
fn seconds(text: &str) -> Result<std::time::Duration, String> {
    let seconds = finite(text)?;
    match std::time::Duration::try_from_secs_f64(seconds) {
        Ok(time) if !time.is_zero() => Ok(time),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

fn temperature(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(t) if t.is_finite() && t >= 0.0 => Ok(t),
        Ok(_) => Err("a finite number of at least 0 is needed".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn backend(text: &str) -> Result<Device, kv::Error> {
    text.parse()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn temperature_is_a_number_from_0() {
        assert_eq!(temperature("0"), Ok(0.0));
        assert_eq!(temperature("0.75"), Ok(0.75));
        for text in ["-1", "NaN", "inf", "warm", ""] {
            assert!(temperature(text).is_err(), "{text}");
        }
    }
}
