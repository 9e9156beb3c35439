package accelerate

import "testing"

// slowPrograms waits at each call.
type slowPrograms struct {
	calls chan string
	end   chan struct{} // ends a call
}

func (p slowPrograms) Join(device string, _ int) error  { return p.call("join " + device) }
func (p slowPrograms) Leave(device string, _ int) error { return p.call("leave " + device) }

func (p slowPrograms) call(what string) error {
	p.calls <- what
	<-p.end
	return nil
}

// Requests do not wait. A device that is to be left is not joined any more, and comes first.
func TestAttacher(t *testing.T) {
	p := slowPrograms{make(chan string), make(chan struct{})}
	a := startAttacher(p)
	request := func(number uint64, index int, name string) attachment { return attachment{number, index, name} }
	a.join(request(1, 11, "veth1"))
	if got := <-p.calls; got != "join veth1" {
		t.Fatalf("got %s", got)
	}
	a.join(request(2, 12, "veth2"))
	a.join(request(3, 13, "veth3"))
	a.leave(request(4, 12, "veth2"))
	for _, want := range []string{"leave veth2", "join veth3"} {
		p.end <- struct{}{}
		<-a.results
		if got := <-p.calls; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	}
	a.join(request(5, 14, "veth4"))
	a.cancel()
	p.end <- struct{}{}
	a.stop() // without a reader of the results, and without veth4
}
