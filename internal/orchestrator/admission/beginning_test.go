package admission

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
)

// At most beginningAtOnce streams start at a time, the others in order of arrival. A stream that has waited for
// beginWait is refused. A canceled one leaves the queue.
func TestBegin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := 0
		g := NewCallLimiter(DefaultLimits, func(string) { refused++ })
		var begun []func()
		for range beginningAtOnce {
			done, err := g.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			begun = append(begun, done)
		}
		var order []int
		canceled, cancel := context.WithCancel(t.Context())
		for i := range 4 {
			ctx := t.Context()
			if i == 1 {
				ctx = canceled
			}
			go func() {
				switch _, err := g.Begin(ctx); {
				case err == nil:
					order = append(order, i)
				case i == 1 && err == context.Canceled:
				default:
					if connect.CodeOf(err) != connect.CodeUnavailable {
						t.Error(err)
					}
					order = append(order, -i)
				}
			}()
			synctest.Wait()
		}
		cancel()
		synctest.Wait()
		for _, end := range begun[:2] { // 0 and 2 start, because 1 was canceled
			end()
			synctest.Wait()
		}
		time.Sleep(beginWait)
		synctest.Wait()
		if want := []int{0, 2, -3}; !slices.Equal(order, want) || refused != 1 {
			t.Errorf("got order %v, %d refused; want %v, 1 refused", order, refused, want)
		}
	})
}
