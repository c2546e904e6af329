//! Arguments of collective calls. PyO3's own parser would raise what is wrong with them before the peers can be told, so
//! these methods take whatever comes, and this is where it is looked at.

use std::convert::Infallible;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyTuple};

/// An argument that was given, None included, or was not.
pub(crate) struct Given<'py>(pub(crate) Option<Bound<'py, PyAny>>);

impl<'py> FromPyObject<'_, 'py> for Given<'py> {
    type Error = Infallible;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> Result<Given<'py>, Infallible> {
        Ok(Given(Some(value.to_owned())))
    }
}

/// Arguments as a call of Python gives them.
pub(crate) struct Arguments<'a, 'py> {
    pub(crate) positional: &'a Bound<'py, PyTuple>,
    pub(crate) keywords: Option<&'a Bound<'py, PyDict>>,
}

impl<'py> Arguments<'_, 'py> {
    /// What was given for each name, and what Python would say against the call. `places`: names that may be given by
    /// position; the first `required` have to be given. `options`: names that may not.
    pub(crate) fn bind<const P: usize, const O: usize>(
        &self,
        method: &str,
        places: [&str; P],
        required: usize,
        options: [&str; O],
    ) -> (Found<'py, P>, Found<'py, O>, PyResult<()>) {
        let mut found = ([const { None }; P], [const { None }; O]);
        let checked = self.sort(&places, required, &options, (&mut found.0, &mut found.1)).and_then(|()| {
            let lacks = |(name, found): (&&str, &Option<_>)| found.is_none().then(|| format!("'{name}'"));
            let missing: Vec<_> = places.iter().zip(&found.0).take(required).filter_map(lacks).collect();
            let Some((last, before)) = missing.split_last() else { return Ok(()) };
            let names =
                if before.is_empty() { last.clone() } else { format!("{} and {last}", before.join(", ")) };
            let (count, s) = (missing.len(), if before.is_empty() { "" } else { "s" });
            Err(format!("missing {count} required positional argument{s}: {names}"))
        });
        let checked = checked.map_err(|what| PyTypeError::new_err(format!("All2All.{method}() {what}")));
        (found.0, found.1, checked)
    }

    /// Puts every argument where it belongs, the rest of them too when one does not: a refusal has to know the stream.
    fn sort(
        &self,
        places: &[&str],
        required: usize,
        options: &[&str],
        found: (&mut [Argument<'py>], &mut [Argument<'py>]),
    ) -> Result<(), String> {
        let mut wrong = None;
        for (place, value) in found.0.iter_mut().zip(self.positional.iter()) {
            *place = Some(value);
        }
        let (most, given) = (places.len(), self.positional.len());
        if given > most {
            let from = if required < most { format!("from {required} to ") } else { String::new() };
            let s = if most == 1 { "" } else { "s" };
            wrong = Some(format!("takes {from}{most} positional argument{s} but {given} were given"));
        }
        for (key, value) in self.keywords.into_iter().flatten() {
            let name = key.cast::<PyString>().ok().and_then(|key| key.to_str().ok()).unwrap_or_default();
            if let Some(at) = options.iter().position(|&option| option == name) {
                found.1[at] = Some(value);
            } else if let Some(at) = places.iter().position(|&place| place == name) {
                if found.0[at].replace(value).is_some() {
                    wrong = wrong.or_else(|| Some(format!("got multiple values for argument '{name}'")));
                }
            } else {
                wrong = wrong.or_else(|| Some(format!("got an unexpected keyword argument '{key}'")));
            }
        }
        wrong.map_or(Ok(()), Err)
    }
}

type Argument<'py> = Option<Bound<'py, PyAny>>;

/// What was given for some names.
pub(crate) type Found<'py, const N: usize> = [Argument<'py>; N];
