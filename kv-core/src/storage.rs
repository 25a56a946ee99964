//! Device memory of one group: planes, divided into segments.
//!
//! Here planes are allocated; `planes` and `view` know no device, so that plans can read them.
mod erased;
mod planes;
mod roles;
mod view;

use kv_format::KvFormat;

use crate::backend::{Backend, Capabilities, Queue};
use crate::calibration::PlaneConstants;
use crate::error::{DeviceError, DeviceErrorKind};
use crate::geometry::PlaneLayout;
use crate::ids::PlaneRole;
use crate::num::to_u64;
pub use erased::AnyBuffer;
pub use planes::KvStorage;
use planes::PlaneBuffers;
pub use roles::BlockPlanes;
pub use view::{PlaneView, StorageView};

/// Refuses planes whose rows the device cannot store, and lists the supported ones, because the
/// caller may choose another format or padding.
fn check_rows(capabilities: &Capabilities, planes: &BlockPlanes) -> Result<(), DeviceError> {
    let unsupported = |problem: String| {
        DeviceError::new(DeviceErrorKind::Unsupported, "allocate planes").with_detail(problem)
    };
    for (plane, layout) in planes.as_slice() {
        // Parts of states are copied and converted: of any length, and by every device in elements.
        let is_state = matches!(plane, PlaneRole::State(_));
        if is_state && !layout.format().is_quantised() {
            continue;
        }
        let dim = layout.head_dim();
        if !is_state && !capabilities.takes_head_dim(dim) {
            let (multiple, max) = (capabilities.head_dim_multiple, capabilities.head_dim_max);
            return Err(unsupported(format!(
                "head_dim {dim} of {plane}, multiples of {multiple} up to {max} are taken"
            )));
        }
        let format = layout.format();
        if !capabilities.takes_format(format) {
            let taken = capabilities.formats.unwrap_or_default().iter();
            let taken: Vec<_> = taken.map(KvFormat::to_string).collect();
            let taken = taken.join(", ");
            return Err(unsupported(format!("format {format} of {plane}, taken are: {taken}")));
        }
    }
    Ok(())
}

impl<Buf> KvStorage<Buf> {
    /// Divides the planes into segments for a device; no layer has memory yet.
    ///
    /// # Errors
    /// [`DeviceErrorKind::Unsupported`] for a `head_dim` or a stored format that the device does
    /// not support, and if a single block exceeds what it can bind.
    pub fn new<B: Backend<Buffer = Buf>>(
        backend: &B,
        planes: impl Into<BlockPlanes>,
    ) -> Result<Self, DeviceError> {
        let planes = planes.into();
        let capabilities = backend.capabilities();
        check_rows(capabilities, &planes)?;
        let max = capabilities.buffer_bytes_max.min(capabilities.binding_bytes_max);
        let block = planes.layouts().map(PlaneLayout::block_bytes).max().unwrap_or(1);
        let blocks = max.checked_div(block).unwrap_or(0);
        if blocks == 0 {
            return Err(DeviceError::new(DeviceErrorKind::Unsupported, "allocate planes")
                .with_detail(format!("a block of {block} bytes, the device binds {max}")));
        }
        // A segment need not hold more.
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Ok(Self { planes: planes.with_segments_of(blocks), layers: Vec::new() })
    }

    /// Allocates layer `index` of the group, zeroed; `false` if it has memory already. Constants of
    /// planes stay zero: see [`Self::allocate_with`].
    ///
    /// # Errors
    /// Those of [`Backend::alloc`]; then nothing is kept.
    pub fn allocate<B: Backend<Buffer = Buf>>(
        &mut self,
        backend: &B,
        index: usize,
    ) -> Result<bool, DeviceError> {
        if self.is_allocated(index) {
            return Ok(false);
        }
        let planes = self.alloc(backend)?;
        self.put(index, planes);
        Ok(true)
    }

    /// Allocates like [`Self::allocate`], and uploads the constants of K and V; those that a plane
    /// does not need are ignored.
    ///
    /// # Errors
    /// Those of [`Backend::alloc`] and [`Queue::upload`], [`DeviceErrorKind::OutOfRange`] for
    /// constants of another shape; then nothing is kept.
    pub fn allocate_with<B: Backend<Buffer = Buf>>(
        &mut self,
        (backend, queue): (&B, &mut B::Queue),
        index: usize,
        constants: [Option<&PlaneConstants>; 2],
    ) -> Result<bool, DeviceError> {
        if self.is_allocated(index) {
            return Ok(false);
        }
        let planes = self.alloc(backend)?;
        self.upload(queue, &planes, constants)?;
        self.put(index, planes);
        Ok(true)
    }

    /// Replaces the constants of K and V of an allocated layer.
    pub(crate) fn upload_constants<Q: Queue<Buffer = Buf>>(
        &self,
        queue: &mut Q,
        index: usize,
        constants: [Option<&PlaneConstants>; 2],
    ) -> Result<(), DeviceError> {
        match self.layers.get(index).and_then(Option::as_ref) {
            Some(planes) => self.upload(queue, planes, constants),
            None => Ok(()),
        }
    }

    fn upload<Q: Queue<Buffer = Buf>>(
        &self,
        queue: &mut Q,
        planes: &[PlaneBuffers<Buf>],
        [of_k, of_v]: [Option<&PlaneConstants>; 2],
    ) -> Result<(), DeviceError> {
        for (plane, (role, layout)) in planes.iter().zip(self.planes.as_slice()) {
            let constants = match role {
                PlaneRole::Key => of_k,
                PlaneRole::Value => of_v,
                PlaneRole::State(_) => None,
            };
            let Some((buffer, constants)) = plane.constants.as_ref().zip(constants) else {
                continue;
            };
            let bytes: &[u8] = bytemuck::cast_slice(constants.values());
            if to_u64(bytes.len()) != layout.constants_bytes() {
                return Err(DeviceError::new(DeviceErrorKind::OutOfRange, "upload constants"));
            }
            queue.upload(buffer, 0, bytes)?;
        }
        Ok(())
    }

    fn alloc<B: Backend<Buffer = Buf>>(
        &self,
        backend: &B,
    ) -> Result<Box<[PlaneBuffers<Buf>]>, DeviceError> {
        let plane = |layout: &PlaneLayout| {
            let segments = (0..layout.num_segments())
                .map(|segment| backend.alloc(layout.segment_bytes(segment)))
                .collect::<Result<Vec<_>, _>>()?;
            let constants = layout
                .has_constants()
                .then(|| backend.alloc(layout.constants_bytes()))
                .transpose()?;
            Ok(PlaneBuffers { segments, constants })
        };
        self.planes.layouts().map(plane).collect()
    }

    fn put(&mut self, index: usize, planes: Box<[PlaneBuffers<Buf>]>) {
        if self.layers.len() <= index {
            self.layers.resize_with(index + 1, || None);
        }
        self.layers[index] = Some(planes);
    }
}
