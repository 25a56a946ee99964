//! The arguments of a cache, read once.
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use kv::backend::AnyBackend;
use kv::cpu::{CpuBackend, CpuOptions};
use kv::eviction::Eviction;
use kv::quant::{Calibration, Source, Stored};
use kv::spec::{CacheSpecBuilder, Determinism, PrefixReuse, PublishAt};
use kv::tier::{
    Bytes, BytesError, Identity, ModelDigest, StoreOptions, TierAddress, TierOptions, Wait,
    WaitError,
};
use kv::{CacheSpec, Device, KvCache};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::calibrate;
use crate::card::Home;
use crate::guarded::Memory;
use crate::memory::Stream;
use crate::report::Failure;
use crate::states::StateLayers;

/// Changes of blocks that are kept until tiers follow them.
const CHANGES: usize = 1 << 14;

/// The settings of a cache, as Python gave them.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) layers: u16,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) head_dim_v: Option<u32>,
    pub(crate) format: String,
    pub(crate) block_size: u32,
    pub(crate) num_blocks: Option<u32>,
    pub(crate) memory: Option<Size>,
    pub(crate) max_seq_len: Option<u32>,
    pub(crate) max_sequences: Option<u32>,
    /// Windows, by layer.
    pub(crate) windows: BTreeMap<u16, u32>,
    pub(crate) window_slack: u32,
    pub(crate) sink_tokens: u32,
    pub(crate) prefix_reuse: String,
    pub(crate) eviction: String,
    pub(crate) batch_invariant: bool,
    pub(crate) events: usize,
    pub(crate) device: String,
    pub(crate) threads: Option<usize>,
    pub(crate) calibration: Option<PathBuf>,
    pub(crate) tiers: Vec<String>,
    pub(crate) wait: String,
    pub(crate) chunk_blocks: Option<u32>,
    pub(crate) model: Option<Vec<u8>>,
    pub(crate) states: Vec<StateLayers>,
}

/// A number of bytes, or text such as `2GiB`.
#[derive(Debug, FromPyObject)]
pub(crate) enum Size {
    /// Bytes.
    Number(u64),
    /// Text.
    Text(String),
}

impl Size {
    fn bytes(&self) -> PyResult<u64> {
        match self {
            Self::Number(bytes) => Ok(*bytes),
            Self::Text(text) => {
                let Bytes(bytes) = text.parse().map_err(|problem: BytesError| {
                    PyValueError::new_err(format!("memory={text:?}: {problem}"))
                })?;
                Ok(bytes)
            }
        }
    }
}

/// The size of the pool of a group of layers.
#[derive(Clone, Copy)]
enum Pool {
    Blocks(u32),
    BytesOfLayer(u64),
}

/// Makes the exception for text that is none of the expected words.
fn wrong(name: &str, given: &str, expected: &dyn std::fmt::Display) -> PyErr {
    PyValueError::new_err(format!("{name}={given:?}: {expected}"))
}

/// Reads the name of a device.
///
/// # Errors
/// A `ValueError` for a name that no device has.
pub(crate) fn device_of(name: &str) -> PyResult<Device> {
    name.parse().map_err(|error| wrong("device", name, &error))
}

/// Opens a device.
///
/// # Errors
/// The device's own.
pub(crate) fn connect(device: &Device, threads: Option<usize>) -> Result<AnyBackend, Failure> {
    match (device, threads) {
        (Device::Cpu, Some(threads)) => {
            let options = CpuOptions::default().with_threads(threads);
            let backend = CpuBackend::open(options).map_err(kv::Error::from)?;
            Ok(AnyBackend::new(backend))
        }
        (device, _) => Ok(device.connect()?),
    }
}

impl Settings {
    /// Opens the cache, with its tiers, on a device. On CUDA it works on the caller's stream, which
    /// the caller may have named.
    ///
    /// # Errors
    /// A `ValueError` for text that is no format, tier, device, ..; the exceptions of the library.
    pub(crate) fn open(
        &self,
        device: Device,
        stream: (Stream, bool),
    ) -> Result<(Memory, Option<Identity>, Home), Failure> {
        let stored: Stored =
            self.format.parse().map_err(|error| wrong("format", &self.format, &error))?;
        let spec = self.spec(&stored)?;
        let backend = connect(&device, self.threads)?;
        let (home, queue) = Home::open(device, &backend, stream).map_err(kv::Error::from)?;
        let cache = KvCache::builder(backend, spec).queue(queue);
        let cache = cache.calibration(self.constants(&stored)?).build().map_err(kv::Error::from)?;
        let identity = self.model.as_deref().map(ModelDigest::of_bytes).map(Identity::new);
        if self.tiers.is_empty() {
            return Ok((Memory::Device(Box::new(cache)), identity, home));
        }
        let Some(identity) = identity else {
            return Err(PyTypeError::new_err(
                "tiers= needs model=: bytes or text that name the weights, so that no other \
                 model's rows are loaded",
            )
            .into());
        };
        let tiered = kv::tier::TieredCache::new(cache, identity.clone(), self.tier_options()?)?;
        Ok((Memory::Tiered(Box::new(tiered)), Some(identity), home))
    }

    fn spec(&self, stored: &Stored) -> Result<CacheSpec, Failure> {
        let dim_v = self.head_dim_v.unwrap_or(self.head_dim);
        let reuse = match self.prefix_reuse.as_str() {
            "partial" => PrefixReuse::Partial,
            "full-blocks" => PrefixReuse::FullBlocks,
            "off" => PrefixReuse::Off,
            other => {
                let expected = "\"partial\", \"full-blocks\" or \"off\" is expected";
                return Err(wrong("prefix_reuse", other, &expected).into());
            }
        };
        let eviction: Eviction =
            self.eviction.parse().map_err(|error| wrong("eviction", &self.eviction, &error))?;
        if let Some(layer) = self.windows.keys().find(|layer| **layer >= self.layers) {
            let message = format!("windows has layer {layer}, the cache has {}", self.layers);
            return Err(PyValueError::new_err(message).into());
        }
        let builder = CacheSpec::builder().layers(self.layers).kv_heads(self.kv_heads);
        let mut builder = stored.apply(builder.head_dims(self.head_dim, dim_v));
        builder = builder.prefix_reuse(reuse).eviction(eviction).events(self.events);
        if self.batch_invariant {
            builder = builder.determinism(Determinism::BatchInvariant);
        }
        // Prompts that arrive together compute their common prefix once.
        builder = builder.publish_at(PublishAt::Begin);
        builder = builder.changes(if self.tiers.is_empty() { 0 } else { CHANGES });
        if let Some(tokens) = self.max_seq_len {
            builder = builder.max_seq_len(tokens);
        }
        if let Some(sequences) = self.max_sequences {
            builder = builder.max_sequences(sequences);
        }
        let builder = self.states.iter().fold(self.groups(builder)?, |all, of| of.apply(all));
        Ok(builder.build().map_err(kv::Error::from)?)
    }

    /// Lists the layers that attend to all tokens.
    fn layers_without_window(&self) -> Vec<u16> {
        let only_state =
            |layer: &u16| self.states.iter().any(|of| !of.attend && of.layers.contains(layer));
        let without = (0..self.layers).filter(|layer| !self.windows.contains_key(layer));
        without.filter(|layer| !only_state(layer)).collect()
    }

    /// Sets the blocks: layers with one window form a group. Memory is shared by number of layers
    /// that attend.
    fn groups(&self, builder: CacheSpecBuilder) -> PyResult<CacheSpecBuilder> {
        let layers_with = |left: u32| {
            let windows = self.windows.iter();
            windows.filter(move |(_, window)| **window == left).map(|(layer, _)| *layer)
        };
        let bytes = self.memory.as_ref().map(Size::bytes).transpose()?;
        let without = self.layers_without_window();
        let count = |layers: usize| u64::try_from(layers).unwrap_or(u64::MAX);
        let layers = count(without.len() + self.windows.len()).max(1);
        let size = self.block_size;
        let blocks = match (self.num_blocks, bytes) {
            (Some(blocks), None) => Pool::Blocks(blocks),
            (None, Some(bytes)) => Pool::BytesOfLayer(bytes / layers),
            _ => {
                let message = "either num_blocks= or memory= is expected";
                return Err(PyTypeError::new_err(message));
            }
        };
        let mut builder = match blocks {
            Pool::Blocks(blocks) => builder.paged(size, blocks),
            Pool::BytesOfLayer(bytes) => {
                builder.paged_within(size, bytes * count(without.len()).max(1))
            }
        };
        // Layers with a state attend only if a group lists them.
        if self.states.iter().any(|of| of.attend) && !without.is_empty() {
            builder = builder.group(without, |group| group);
        }
        let windows: BTreeSet<u32> = self.windows.values().copied().collect();
        for left in windows {
            let of_group: Vec<u16> = layers_with(left).collect();
            let count = count(of_group.len());
            builder = builder.group(of_group, |group| {
                let group = group.window_left(left).window_slack(self.window_slack);
                let group = group.sink_tokens(self.sink_tokens);
                match blocks {
                    Pool::Blocks(blocks) => group.paged(size, blocks),
                    Pool::BytesOfLayer(bytes) => group.paged_within(size, bytes * count),
                }
            });
        }
        Ok(builder)
    }

    fn constants(&self, stored: &Stored) -> Result<Option<Calibration>, Failure> {
        let path = match (&self.calibration, &stored.calibration) {
            (Some(path), _) | (None, Some(Source::File(path))) => path,
            (None, Some(Source::Online)) => {
                let message = "calib=online needs a program that computes the rows: give a file";
                return Err(wrong("format", &self.format, &message).into());
            }
            (None, None) => {
                let given = stored.check_scales("calibration=FILE");
                given.map_err(|error| wrong("format", &self.format, &error))?;
                return Ok(None);
            }
        };
        Ok(Some(calibrate::read(path)?))
    }

    fn tier_options(&self) -> Result<TierOptions, Failure> {
        let wait: Wait =
            self.wait.parse().map_err(|error: WaitError| wrong("wait", &self.wait, &error))?;
        let mut options = TierOptions::new().with_wait(wait);
        if let Some(blocks) = self.chunk_blocks {
            options = options.with_chunk_blocks(blocks);
        }
        for text in &self.tiers {
            let address: TierAddress = text
                .parse()
                .map_err(|error| wrong("tiers", &TierAddress::without_account(text), &error))?;
            options = match &address {
                TierAddress::Host { bytes } => options.with_host(*bytes),
                other => {
                    let store = other.open().map_err(|error| wrong("tiers", text, &error))?;
                    let tier = store.tier();
                    options.with_store_options(store, StoreOptions::new(tier))
                }
            };
        }
        Ok(options)
    }
}
