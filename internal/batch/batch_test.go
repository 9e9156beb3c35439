package batch

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// Callers that arrive during a round share the next one, and each gets its own error.
func TestRounds(t *testing.T) {
	started, goOn := make(chan []int), make(chan struct{})
	r := New(new(sync.Mutex), func(all []int) []error {
		started <- all
		<-goOn
		errs := make([]error, len(all))
		for i, n := range all {
			if n%2 == 1 {
				errs[i] = fmt.Errorf("of %d", n)
			}
		}
		return errs
	})
	results := make(chan error)
	do := func(n int) {
		go func() {
			err := r.Do(n)
			if odd := n%2 == 1; odd != (err != nil) || odd && err.Error() != fmt.Sprint("of ", n) {
				err = fmt.Errorf("%d got %v", n, err)
			} else {
				err = nil
			}
			results <- err
		}()
	}
	do(0)
	if all := <-started; !slices.Equal(all, []int{0}) {
		t.Errorf("the first round has %v", all)
	}
	const more = 6
	for n := range more {
		do(n + 1)
	}
	for r.Waiting() < more {
		time.Sleep(time.Millisecond)
	}
	goOn <- struct{}{}
	if all := <-started; len(all) != more {
		t.Errorf("the second round has %v", all)
	}
	goOn <- struct{}{}
	for range more + 1 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}
