//! `empty_output`: a place for results that all ranks make together.

use kvferry::layout::HeadLayout;
use kvferry::{Dtype, Error};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::All2All;
use super::arguments::Arguments;
use super::array::{Axes, ExchangeArray};
use super::held::Held;
use super::options;
use crate::errors::{OrRaise, to_py};

/// What a rank asks for.
struct Wanted {
    /// In the order B, N, H, D; and whether D is not shown.
    shapes: Vec<options::Shape>,
    dtypes: Vec<Dtype>,
    layout: HeadLayout,
    /// One shape was given, not a list.
    single: bool,
}

impl Wanted {
    fn read(py: Python<'_>, given: &Arguments<'_, '_>) -> PyResult<Wanted> {
        let ([shape, dtype], [layout], bound) = given.bind("empty_output", ["shape", "dtype"], 2, ["layout"]);
        bound?;
        let layout = options::layout(py, layout.as_ref())?;
        let none = || py.None().into_bound(py);
        let (shapes, single) = options::shapes(&shape.unwrap_or_else(none), layout)?;
        let dtypes = options::dtypes(&dtype.unwrap_or_else(none), shapes.len())?;
        Ok(Wanted { shapes, dtypes, layout, single })
    }
}

impl All2All {
    pub(crate) fn output<'py>(
        &self,
        py: Python<'py>,
        given: &Arguments<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Wanted { shapes, dtypes, layout, single } = match Wanted::read(py, given) {
            Ok(wanted) => wanted,
            Err(error) => return Err(self.no_output(py, error)),
        };
        let parts: Vec<_> = shapes.iter().zip(dtypes).map(|(&(shape, _), dtype)| (shape, dtype)).collect();
        let output = py.detach(|| self.comm.empty_output(&parts, layout)).or_raise(py)?;
        let results = output.results().or_raise(py)?;
        let mut arrays = Vec::with_capacity(results.len());
        for (index, (result, (_, flat))) in results.into_iter().zip(shapes).enumerate() {
            let held = Held::new(result);
            self.live.add(&held);
            let axes = Axes { layout, flat };
            arrays.push(Bound::new(py, ExchangeArray::new(held, axes, Some((output.clone(), index))))?);
        }
        match arrays.pop() {
            Some(array) if single => Ok(array.into_any()),
            last => {
                arrays.extend(last);
                Ok(PyTuple::new(py, arrays)?.into_any())
            }
        }
    }

    /// Takes part with nothing, which every rank refuses, so that the others do not wait for this one; gives the error
    /// back.
    fn no_output(&self, py: Python<'_>, error: PyErr) -> PyErr {
        match py.detach(|| self.comm.empty_output(&[], HeadLayout::Bnhd)) {
            // Nothing that was said of the arguments matters then.
            Err(other @ (Error::ExchangeClosed | Error::Fork(_))) => to_py(py, other),
            _ => error,
        }
    }
}
