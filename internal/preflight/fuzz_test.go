package preflight

import (
	"fmt"
	"testing"
)

// FuzzKernelVersion: whether a release is new enough depends on its numbers, and not on the text after them.
func FuzzKernelVersion(f *testing.F) {
	f.Add(uint16(6), uint16(12), ".0")
	f.Add(uint16(5), uint16(15), ".0-91-generic")
	f.Add(uint16(10), uint16(0), "-rc1")
	f.Fuzz(func(t *testing.T, major, minor uint16, more string) {
		if more != "" && more[0] >= '0' && more[0] <= '9' {
			more = "." + more
		}
		release := fmt.Sprintf("%d.%d%s", major, minor, more)
		if want := uint32(major)<<16|uint32(minor) >= 6<<16|12; want != (kernelVersion(release).State == OK) {
			t.Errorf("%q: %+v", release, kernelVersion(release))
		}
	})
}
