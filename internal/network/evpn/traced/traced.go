package traced

import "github.com/cilium/ebpf"

// Spec returns the object file. The caller sets its constants and shares the maps of the other programs with it.
func Spec() (*ebpf.CollectionSpec, error) { return loadObject() }
