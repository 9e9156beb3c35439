package netns

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

var errLeft = errors.New("function left its goroutine without returning")

// OnThread runs f on a thread of its own that ends with f, so f may change the thread's
// namespaces, its working folder and its affinity as it likes.
func OnThread(f func() error) error { return onThread(f) }

func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Not unlocked, so the runtime ends the thread. The first thread is the exception: it
		// cannot end, would stay in the namespace for ever and be what /proc/self shows. Held
		// here, it pushes f to another one.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			defer runtime.UnlockOSThread()
			done <- onThread(f)
			return
		}
		err := errLeft
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
			}
			done <- err
		}()
		err = f()
	}()
	return <-done
}
