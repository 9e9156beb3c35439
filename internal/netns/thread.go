package netns

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

var errLeft = errors.New("function left its goroutine without returning")

// OnThread runs f on a separate thread that ends with f. So f may change the thread's namespaces, working folder and
// affinity.
func OnThread(f func() error) error { return onThread(f) }

func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		// f's thread stays locked, so the runtime ends it together with the goroutine. But the process's first thread
		// cannot end: it would stay in the namespace, and /proc/self shows its state. If this is the first thread, it
		// waits here while another thread runs f.
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
