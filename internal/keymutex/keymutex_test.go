package keymutex

import (
	"context"
	"errors"
	"testing"
)

// TestLock: a key has one holder at a time, other keys stay free, and a waiter that gives up leaves nothing behind.
func TestLock(t *testing.T) {
	var l Locks
	unlock, err := l.Lock(t.Context(), "a")
	if err != nil {
		t.Fatal(err)
	}
	other, err := l.Lock(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	other()
	ended, end := context.WithCancel(t.Context())
	end()
	if _, err := l.Lock(ended, "a"); !errors.Is(err, context.Canceled) {
		t.Errorf("the second holds it as well: %v", err)
	}
	got := make(chan error)
	go func() {
		unlock, err := l.Lock(t.Context(), "a")
		if err == nil {
			unlock()
		}
		got <- err
	}()
	unlock()
	if err := <-got; err != nil {
		t.Error(err)
	}
	if len(l.locks) != 0 {
		t.Errorf("%d locks are left", len(l.locks))
	}
}
