package bpfobj

import (
	"errors"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"
)

// TestRetryAllocation: only a lack of memory is retried, and not for ever.
func TestRetryAllocation(t *testing.T) {
	noMemory := fmt.Errorf("batch update: %w", unix.ENOMEM)
	for _, c := range []struct {
		name       string
		failures   int
		err        error
		want       error
		wantWrites int
	}{
		{"no failure", 0, nil, nil, 1},
		{"a reserve that is refilled", 3, noMemory, nil, 4},
		{"a lasting lack", maxAllocations + 1, noMemory, unix.ENOMEM, maxAllocations},
		{"a full map", 1, unix.E2BIG, unix.E2BIG, 1},
	} {
		writes := 0
		err := retryAllocation(func() error {
			if writes++; writes <= c.failures {
				return c.err
			}
			return nil
		})
		if !errors.Is(err, c.want) || writes != c.wantWrites {
			t.Errorf("%s: %v after %d writes, want %v after %d", c.name, err, writes, c.want, c.wantWrites)
		}
	}
}
