package admission

import (
	"context"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"
)

// Streams that begin do so in the order in which they came, so many at once; one that waited for too long is sent away,
// and one that went is waited for by nobody.
func TestBeginning(t *testing.T) {
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
		gone, leave := context.WithCancel(t.Context())
		for i := range 4 {
			ctx := t.Context()
			if i == 1 {
				ctx = gone
			}
			go func() {
				switch _, err := g.Begin(ctx); {
				case err == nil:
					order = append(order, i)
				case i == 1 && err == context.Canceled: // it went
				default:
					if connect.CodeOf(err) != connect.CodeUnavailable {
						t.Error(err)
					}
					order = append(order, -i)
				}
			}()
			synctest.Wait()
		}
		leave()
		synctest.Wait()
		for _, end := range begun[:2] { // 0 and 2 have their turn, in place of 1
			end()
			synctest.Wait()
		}
		time.Sleep(beginWait)
		synctest.Wait()
		if want := []int{0, 2, -3}; !slices.Equal(order, want) || refused != 1 {
			t.Errorf("began in order %v, %d refused; want %v", order, refused, want)
		}
	})
}
