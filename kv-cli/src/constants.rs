//! Constants of quantised storage.
use crate::loaded::Loaded;
use crate::model::Llama;
use kv::Calibration;
use std::path::Path;
pub(crate) fn load(_path: &Path, _model: &Llama) -> anyhow::Result<Calibration> {
    anyhow::bail!("x")
}
pub(crate) fn make(_loaded: &Loaded, _path: &Path, _tokens: u32) -> anyhow::Result<Calibration> {
    anyhow::bail!("x")
}
