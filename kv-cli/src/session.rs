//! Everything a run needs, opened once: the model, its tokenizer, the device, the prompts.
use anyhow::Context;
use kv::{
    AnyBackend, CacheSpec, Calibration, Determinism, KvCache, PrefixReuse, PublishAt, SpecError,
};

use crate::args::{GenerateArgs, Paged};
use crate::config::ModelConfig;
use crate::constants;
use crate::loaded::Loaded;
use crate::model::Decoder;
use crate::num::{to_u32, to_usize};
use crate::prompts;
use crate::sampler::Sampler;
use crate::scheduler::{BeamOptions, Generated, Limits, News, Reading, Request, Scheduler, Stats};
use crate::stored::{Source, Stored, blocks_of};
use crate::text::Text;

/// What is the same for every run of one command.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) model_name: String,
    pub(crate) model: Decoder,
    pub(crate) text: Text,
    pub(crate) backend: AnyBackend,
    pub(crate) prompts: Vec<Prompt>,
    /// Constants of the stored format, where it was given some.
    calibration: Option<Calibration>,
}

#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
}

/// How the cache's memory is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    Paged(Paged),
    Contiguous { sequences: u32, tokens: u32 },
}

impl std::fmt::Display for Layout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Paged(Paged { block_size, num_blocks }) => {
                write!(f, "paged {block_size},{num_blocks}")
            }
            Self::Contiguous { sequences, tokens } => write!(f, "contiguous {sequences}x{tokens}"),
        }
    }
}

/// What differs between runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Variant {
    pub(crate) layout: Layout,
    pub(crate) max_new_tokens: u32,
    pub(crate) forget: bool,
    pub(crate) ignore_eos: bool,
    /// Whether prompts take over what is cached of others.
    pub(crate) reuse: bool,
    /// Beam search, where it was asked for.
    pub(crate) beams: Option<BeamOptions>,
    /// Guesses of the next tokens that each sequence brings to a step.
    pub(crate) draft_tokens: u32,
    /// Sequences that run at once.
    pub(crate) max_batch: u32,
}

impl Variant {
    /// What the command line asks for.
    pub(crate) fn new(args: &GenerateArgs, layout: Layout) -> Self {
        let (width, length_penalty) = (args.beams, args.length_penalty);
        Self {
            layout,
            max_new_tokens: args.max_new_tokens,
            forget: args.no_cache,
            ignore_eos: args.ignore_eos,
            reuse: !(args.no_reuse || args.no_cache),
            beams: (width > 1).then_some(BeamOptions { width, length_penalty }),
            draft_tokens: args.draft_tokens,
            max_batch: args.max_batch,
        }
    }
}

/// Block size and bytes of a cache that was not described.
const BLOCK_SIZE: u32 = 16;
const CACHE_BYTES: u64 = 1 << 30;

impl Session {
    pub(crate) fn open(args: &GenerateArgs) -> anyhow::Result<Self> {
        let texts = prompts::collect(&args.prompt, args.prompts.as_deref())?;
        let loaded = Loaded::open(args.model.as_deref(), args.tokenizer.as_deref(), &args.backend)?;
        let Loaded { name: model_name, model, text, backend } = loaded;
        let ModelConfig { vocab, bos, .. } = *model.config();
        let encode = |prompt: String| {
            let ids = text.encode(&prompt, vocab, bos)?;
            Ok(Prompt { text: prompt, ids })
        };
        let prompts = texts.into_iter().map(encode).collect::<anyhow::Result<_>>()?;
        let mut session = Self { model_name, model, text, backend, prompts, calibration: None };
        session.calibration = session.calibrate(&args.format)?;
        Ok(session)
    }

    /// The constants that a format comes with.
    fn calibrate(&self, stored: &Stored) -> anyhow::Result<Option<Calibration>> {
        let first = self.prompts.first().map_or(&[][..], |prompt| &prompt.ids);
        Ok(match &stored.calibration {
            Some(Source::File(path)) => Some(constants::load(path, &self.model)?),
            Some(Source::Online) => {
                let online = constants::online(&self.model, &self.backend, first, stored.sinks());
                Some(online.context("calib=online")?)
            }
            None => {
                stored.check_scales("calib=FILE or calib=online")?;
                None
            }
        })
    }

    /// Sequences that can run at once: the beams of one prompt at least.
    fn batch(&self, args: &GenerateArgs) -> u32 {
        let all = to_u32(self.prompts.len()).saturating_mul(args.beams);
        args.max_batch.min(all).max(args.beams)
    }

    pub(crate) fn contiguous(&self, args: &GenerateArgs) -> Layout {
        Layout::Contiguous { sequences: self.batch(args), tokens: self.model.config().context }
    }

    /// Blocks for the whole batch at the model's context, within bounds, but enough for each prompt
    /// alone.
    pub(crate) fn paged(&self, args: &GenerateArgs) -> anyhow::Result<Layout> {
        if let Some(paged) = args.paged {
            return Ok(Layout::Paged(paged));
        }
        let context = self.model.config().context;
        let few = args.format.few_blocks(self.model.config(), BLOCK_SIZE)?;
        let slots = CACHE_BYTES.checked_div(few.memory().bytes_per_token.max(1)).unwrap_or(0);
        let affordable = slots.checked_div(BLOCK_SIZE.into()).unwrap_or(0);
        let affordable = u32::try_from(affordable).unwrap_or(u32::MAX);
        let wanted = blocks_of(&few, context).saturating_mul(self.batch(args));
        let alone = |prompt: &Prompt| {
            let prompt = to_u32(prompt.ids.len());
            let tokens = prompt.saturating_add(args.max_new_tokens).min(context);
            let chunk = args.max_step_tokens.min(if args.no_cache { tokens } else { prompt });
            let width = args.beams;
            let reading = Reading { prompt, chunk, tokens, width, forget: args.no_cache };
            few.groups().iter().map(|group| reading.blocks(group)).max().unwrap_or(0)
        };
        let alone = self.prompts.iter().map(alone).max().unwrap_or(0);
        let num_blocks = wanted.min(affordable).max(alone).max(1);
        Ok(Layout::Paged(Paged { block_size: BLOCK_SIZE, num_blocks }))
    }

    fn spec(&self, variant: &Variant, stored: &Stored) -> Result<CacheSpec, SpecError> {
        let config = self.model.config();
        stored.spec(config, |builder| {
            let builder = builder
                .max_seq_len(config.context)
                // What a sequence says must not depend on its neighbours.
                .determinism(Determinism::BatchInvariant)
                .prefix_reuse(if variant.reuse { PrefixReuse::Partial } else { PrefixReuse::Off })
                // Prompts that arrive together compute what they share once.
                .publish_at(PublishAt::Begin);
            match variant.layout {
                Layout::Paged(Paged { block_size, num_blocks }) => {
                    builder.paged(block_size, num_blocks)
                }
                Layout::Contiguous { sequences, tokens } => builder.contiguous(sequences, tokens),
            }
        })
    }

    /// Tokens that end a text in this run.
    pub(crate) fn stop(&self, variant: &Variant) -> Vec<u32> {
        if variant.ignore_eos { Vec::new() } else { self.model.config().eos.clone() }
    }

    /// Runs all prompts once, through a cache of their own.
    pub(crate) fn run(
        &self,
        args: &GenerateArgs,
        variant: &Variant,
        news: &mut News<'_>,
    ) -> anyhow::Result<(Vec<Generated>, Stats)> {
        let prompts = self.prompts.iter().map(|prompt| prompt.ids.clone()).collect();
        self.run_prompts(args, variant, prompts, news)
    }

    /// Runs these prompts once, through a cache of their own.
    pub(crate) fn run_prompts(
        &self,
        args: &GenerateArgs,
        variant: &Variant,
        prompts: Vec<Vec<u32>>,
        news: &mut News<'_>,
    ) -> anyhow::Result<(Vec<Generated>, Stats)> {
        let (backend, spec) = (self.backend.clone(), self.spec(variant, &args.format)?);
        let cache = match &self.calibration {
            Some(calibration) => KvCache::with_calibration(backend, spec, calibration.clone())?,
            None => KvCache::new(backend, spec)?,
        };
        let limits = Limits {
            max_batch: to_usize(variant.max_batch),
            max_step_tokens: to_usize(args.max_step_tokens),
            context: self.model.config().context,
            stop: self.stop(variant),
            forget: variant.forget,
            draft_tokens: to_usize(variant.draft_tokens),
        };
        let request = |(index, prompt)| Request {
            prompt,
            max_new_tokens: variant.max_new_tokens,
            sampler: Sampler::new(args.temperature, args.seed, index),
            beams: variant.beams,
        };
        let requests = prompts.into_iter().enumerate().map(request).collect();
        Scheduler::new(cache, &self.model, limits).run(requests, news)
    }
}
