//! One `kv generate`: model, prompts, and runs with a cache each.
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, anyhow};
use kv::engine::{
    Advice, BeamOptions, Engine, Event, Generated, Limits, Request, RequestError, RequestSize,
    Sampler, Stats,
};
use kv::quant::Calibration;
use kv::quant::{Source, Stored};
use kv::tier::{Identity, ModelDigest, TiersStats};
use kv_runner::blocks_of;
use kv_runner::{CacheOptions, Layout, StateOptions, calibrate};

use crate::args::{EngineArgs, GenerateArgs, Paged};
use crate::loaded::Loaded;
use crate::num::to_u32;
use crate::session::{self, SessionFile};
use crate::{prompts, tiers};

/// Shared by all runs of one command.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) loaded: Loaded,
    pub(crate) prompts: Vec<Prompt>,
    /// Constants of the stored format, if it has some.
    calibration: Option<Calibration>,
    /// Digest of the weights, if there are tiers.
    digest: Option<ModelDigest>,
    /// The file of `--session`.
    session: Option<SessionFile>,
}

/// The results of one run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) generated: Vec<Generated>,
    pub(crate) stats: Stats,
    pub(crate) tiers: Option<TiersStats>,
    pub(crate) session: Option<session::Report>,
}

#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
}

/// Settings that differ between runs.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_excessive_bools, reason = "one switch of a run each")]
pub(crate) struct Variant {
    pub(crate) layout: Layout,
    pub(crate) max_new_tokens: u32,
    pub(crate) forget: bool,
    pub(crate) ignore_eos: bool,
    /// Whether prompts reuse cached prefixes of others.
    pub(crate) reuse: bool,
    /// Beam search, if requested.
    pub(crate) beams: Option<BeamOptions>,
    /// Draft tokens per sequence and step.
    pub(crate) draft_tokens: u32,
    /// Sequences that run at once.
    pub(crate) max_batch: u32,
    /// Whether the cache has the tiers of the command line.
    pub(crate) tiers: bool,
}

impl Variant {
    /// Makes the variant of the command line.
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
            max_batch: args.engine.max_batch,
            tiers: !args.engine.tier.is_empty(),
        }
    }
}

/// Default block size, and largest default cache.
pub(crate) const BLOCK_SIZE: u32 = 16;
const CACHE_BYTES: u64 = 1 << 30;

impl Job {
    pub(crate) fn open(args: &GenerateArgs) -> anyhow::Result<Self> {
        let mut texts = prompts::collect(&args.prompt, args.prompts.as_deref())?;
        let loaded = Loaded::open(&args.engine.model)?;
        let is_named = !args.engine.tier.is_empty() || args.session.is_some();
        let digest = if is_named { Some(tiers::digest(&loaded.path)?) } else { None };
        let open = |(path, digest): (&PathBuf, _)| SessionFile::open(path, Identity::new(digest));
        let session = args.session.as_ref().zip(digest).map(open).transpose()?;
        if let Some(session) = &session {
            texts = session.prompts(&args.prompt).unwrap_or(texts);
        }
        let encode = |text: String| {
            let ids = match &session {
                Some(session) => session.encode(&text, &loaded)?,
                None => loaded.encode(&text)?,
            };
            Ok(Prompt { text, ids })
        };
        let prompts = texts.into_iter().map(encode).collect::<anyhow::Result<_>>()?;
        let mut job = Self { loaded, prompts, calibration: None, digest, session };
        job.calibration = job.calibrate(&args.engine.format)?;
        Ok(job)
    }

    /// Returns the constants of a format.
    fn calibrate(&self, stored: &Stored) -> anyhow::Result<Option<Calibration>> {
        let Loaded { model, backend, .. } = &self.loaded;
        let first = self.prompts.first().map_or(&[][..], |prompt| &prompt.ids);
        Ok(match &stored.calibration {
            Some(Source::File(path)) => Some(calibrate::load(path, model)?),
            Some(Source::Online) => {
                let online =
                    calibrate::online(model, backend, first, stored.full_precision_prefix());
                Some(online.context("calib=online")?)
            }
            None => {
                stored.check_scales("calib=FILE or calib=online")?;
                None
            }
        })
    }

    /// Returns the longest sequence of the model.
    fn context(&self) -> u32 {
        self.loaded.model.config().context()
    }

    /// Returns the number of sequences that run at once: at least the beams of one prompt.
    fn batch(&self, args: &GenerateArgs) -> u32 {
        // Beams may be any number.
        let all = to_u32(self.prompts.len()).saturating_mul(args.beams);
        args.engine.max_batch.min(all).max(args.beams)
    }

    pub(crate) fn contiguous(&self, args: &GenerateArgs) -> Layout {
        Layout::Contiguous { sequences: self.batch(args), tokens: self.context() }
    }

    /// Returns blocks for the whole batch at the model's context, within limits, but enough for
    /// each prompt alone.
    pub(crate) fn paged(&self, args: &GenerateArgs) -> anyhow::Result<Layout> {
        if let Some(Paged { block_size, num_blocks }) = args.engine.paged {
            return Ok(Layout::Paged { block_size, num_blocks });
        }
        let context = self.context();
        let few = self.loaded.model.config().few_blocks(&args.engine.format, BLOCK_SIZE)?;
        let wanted = affordable_blocks(&args.engine, &self.loaded, self.batch(args))?;
        let alone = |prompt: &Prompt| {
            let prompt = to_u32(prompt.ids.len());
            // New tokens may be any number.
            let tokens = prompt.saturating_add(args.max_new_tokens).min(context);
            let chunk =
                args.engine.max_step_tokens.min(if args.no_cache { tokens } else { prompt });
            let width = args.beams;
            let size = RequestSize { prompt, chunk, tokens, width, forget: args.no_cache };
            few.groups().iter().map(|group| size.blocks(group)).max().unwrap_or(0)
        };
        let alone = self.prompts.iter().map(alone).max().unwrap_or(0);
        let num_blocks = wanted.max(alone);
        Ok(Layout::Paged { block_size: BLOCK_SIZE, num_blocks })
    }

    /// Returns the tokens that end a text in this run.
    pub(crate) fn stop(&self, variant: &Variant) -> Vec<u32> {
        if variant.ignore_eos { Vec::new() } else { self.loaded.model.config().eos().to_vec() }
    }

    /// Runs the prompts once, with a new cache. `begin` is called when all of them are accepted,
    /// `show` with every event.
    pub(crate) fn run(
        &self,
        args: &GenerateArgs,
        variant: &Variant,
        prompts: Vec<Vec<u32>>,
        show: &mut impl Show,
    ) -> anyhow::Result<Run> {
        let options = CacheOptions {
            layout: variant.layout,
            stored: args.engine.format.clone(),
            reuse: variant.reuse,
            tiers: variant.tiers,
            events: 0,
            states: StateOptions::for_sequences(variant.max_batch, variant.draft_tokens),
        };
        let limits = Limits {
            max_batch: variant.max_batch,
            max_step_tokens: args.engine.max_step_tokens,
            stop: self.stop(variant),
            forget: variant.forget,
            draft_tokens: variant.draft_tokens,
            ..self.loaded.model.config().limits()
        };
        let digest = self.digest.filter(|_| variant.tiers);
        let constants = (self.calibration.as_ref(), digest);
        let mut engine = engine(&args.engine, &self.loaded, constants, &options, limits)?;
        let loaded = match &self.session {
            Some(session) => session.load(&mut engine)?,
            None => 0,
        };
        for (index, prompt) in prompts.into_iter().enumerate() {
            let sampler = Sampler::new(args.temperature, args.seed, index);
            let sampler = match &self.session {
                Some(session) => session.go_on(sampler),
                None => sampler,
            };
            let request = Request::new(prompt, variant.max_new_tokens);
            let request = Request { sampler, beams: variant.beams, ..request };
            engine.submit(request).map_err(with_flags)?;
        }
        show.begin()?;
        let mut generated = Vec::new();
        while engine.has_work() {
            for event in engine.step(&self.loaded.model)? {
                show.event(&event)?;
                if let Event::Finished { index, generated: finished } = event {
                    generated.push((index, finished));
                }
            }
        }
        generated.sort_by_key(|(index, _)| *index);
        let generated: Vec<_> = generated.into_iter().map(|(_, generated)| generated).collect();
        let now = Instant::now();
        tiers::note_left(engine.flush_tiers(now.checked_add(tiers::FLUSH).unwrap_or(now))?)?;
        let tiers = engine.tiers();
        if let Some(tiers) = &tiers {
            tiers::warn(&tiers::store_names(&args.engine), tiers)?;
        }
        // Saving reuses blocks too: not counted.
        let stats = engine.stats();
        let session = match (&self.session, self.prompts.first(), generated.first()) {
            (Some(session), Some(prompt), Some(generated)) => {
                let text = (prompt.ids.clone(), loaded);
                Some(session.save(&mut engine, text, generated)?)
            }
            _ => None,
        };
        Ok(Run { generated, stats, tiers, session })
    }

    /// Returns the tokens of all prompts.
    pub(crate) fn prompt_ids(&self) -> Vec<Vec<u32>> {
        self.prompts.iter().map(|prompt| prompt.ids.clone()).collect()
    }
}

/// Opens an engine over a new cache, with the tiers of the command line if the weights' digest is
/// given.
pub(crate) fn engine(
    args: &EngineArgs,
    loaded: &Loaded,
    (calibration, digest): (Option<&Calibration>, Option<ModelDigest>),
    options: &CacheOptions,
    limits: Limits,
) -> anyhow::Result<Engine> {
    let cache = options.open(&loaded.model, loaded.backend.clone(), calibration)?;
    Ok(match digest {
        Some(digest) => Engine::tiered(tiers::open(args, digest, cache)?, limits),
        None => Engine::new(cache, limits),
    })
}

/// Returns blocks for a batch at the model's context, as many as fit the default size of a cache.
pub(crate) fn affordable_blocks(
    args: &EngineArgs,
    loaded: &Loaded,
    batch: u32,
) -> anyhow::Result<u32> {
    let states = StateOptions::for_sequences(batch, 0);
    let blocks = args.format.blocks_min();
    let few = loaded.model.config();
    let few = few.spec_with(&args.format, &states, |cache| cache.paged(BLOCK_SIZE, blocks))?;
    let memory = few.memory();
    // Rows get a quarter at least, however large the states are.
    let bytes = CACHE_BYTES.saturating_sub(memory.bytes_states).max(CACHE_BYTES / 4);
    let slots = bytes.checked_div(memory.bytes_per_token.max(1)).unwrap_or(0);
    let affordable = slots.checked_div(BLOCK_SIZE.into()).unwrap_or(0);
    // Saturating, down to what is affordable or what a pool numbers.
    let affordable = u32::try_from(affordable).unwrap_or(u32::MAX);
    let context = loaded.model.config().context();
    Ok(blocks_of(&few, context).saturating_mul(batch).min(affordable).max(1))
}

/// Shows the events of a run.
pub(crate) trait Show {
    /// Called when all requests are accepted.
    fn begin(&mut self) -> anyhow::Result<()>;
    /// Called with each event.
    fn event(&mut self, event: &Event) -> anyhow::Result<()>;
}

/// Shows nothing.
pub(crate) struct Silent;

impl Show for Silent {
    fn begin(&mut self) -> anyhow::Result<()> {
        Ok(())
    }

    fn event(&mut self, _: &Event) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Adds the options that would let the request run.
fn with_flags(error: RequestError) -> anyhow::Error {
    let flags = match &error {
        RequestError::DoesNotFit { shortage, .. } => {
            let Advice { chunk, has_beams, paged, .. } = shortage.advice;
            let chunk = chunk.map(|chunk| format!("--max-step-tokens {chunk}, "));
            let paged = paged.map(|(size, blocks)| format!("--paged {size},{blocks}, "));
            let beams = if has_beams { "fewer --beams, " } else { "" };
            format!(
                "{}{}{beams}or fewer --max-new-tokens would help",
                chunk.unwrap_or_default(),
                paged.unwrap_or_default()
            )
        }
        RequestError::TooLong { .. } => "fewer --max-new-tokens would help".to_owned(),
        RequestError::TooManyBeams { .. } => "fewer --beams would help".to_owned(),
        _ => return error.into(),
    };
    anyhow!("{error}: {flags}")
}
