package oncache

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pilaster.io/pilaster/internal/packet"
)

// refusal is a packet that the programs leave to the overlay, with fill's connection in the cache.
type refusal struct {
	name    string // begins with the program
	frame   func(world) []byte
	only    func(world) bool // nil: in each world
	gsoSize uint32
	prepare func(*testing.T, *bench)
	cause   string // the counter that counts it, "": none
	learns  bool   // the packet gets a learn mark
	forgets bool   // the connection is not valid any more, so that both directions pass the overlay again
}

func (r refusal) program() string { return strings.SplitN(r.name, ":", 2)[0] }

// way is the direction: 1 out, 2 in.
func (r refusal) way() uint32 {
	if strings.HasSuffix(r.program(), "out") {
		return 1
	}
	return 2
}

func (d Direction) counters() map[string]uint64 {
	all := map[string]uint64{"hit": d.Hits, "learnt": d.Learnt}
	for _, m := range []map[string]uint64{d.Misses, d.NotLearnt} {
		for cause, n := range m {
			all[cause] = n
		}
	}
	return all
}

// counted returns the causes that a step has counted.
func (b *bench) counted(t *testing.T, way uint32, step func()) (causes []string) {
	t.Helper()
	before, err := b.direction(int(way))
	must(t, err)
	step()
	after, err := b.direction(int(way))
	must(t, err)
	for cause, n := range after.counters() {
		for range n - before.counters()[cause] {
			causes = append(causes, cause)
		}
	}
	slices.Sort(causes)
	return causes
}

func (r refusal) causes() []string {
	if r.cause == "" {
		return nil
	}
	return []string{r.cause}
}

// fault says how the program fails the case, "" if it does not.
func (r refusal) fault(t *testing.T, b *bench) string {
	b.fill(t)
	if r.prepare != nil {
		r.prepare(t, b)
	}
	was, frame := b.known(t), r.frame(b.world)
	var verdict, mark uint32
	var out []byte
	causes := b.counted(t, r.way(), func() {
		verdict, out, mark = b.run(t, step{program: r.program(), frame: frame, mark: others, gsoSize: r.gsoSize})
	})
	want := uint32(others)
	if r.learns {
		want |= b.field(r.way())
	}
	switch known := b.known(t); {
	case verdict != next || !bytes.Equal(out, frame):
		return fmt.Sprintf("verdict %d; changed: %v", int32(verdict), !bytes.Equal(out, frame))
	case mark != want:
		return fmt.Sprintf("mark %#x, want %#x", mark, want)
	case was && known == r.forgets:
		return fmt.Sprintf("known afterwards: %v", known)
	case !slices.Equal(causes, r.causes()):
		return fmt.Sprintf("counted %q, want %q", causes, r.causes())
	}
	return ""
}

// lesson is a packet from which the programs learn nothing, with an empty cache.
type lesson struct {
	name    string
	frame   func(world) []byte
	only    func(world) bool
	mark    func(*bench) uint32 // nil: the right one
	plain   bool
	prepare func(*testing.T, *bench)
	cause   string
}

func (l lesson) fault(t *testing.T, b *bench) string {
	b.clean(t)
	b.introduce(t)
	r := refusal{name: l.name, cause: l.cause}
	mark := others | b.field(r.way())
	if l.prepare != nil {
		l.prepare(t, b)
	}
	if l.mark != nil {
		mark = others | l.mark(b)
	}
	var verdict uint32
	causes := b.counted(t, r.way(), func() {
		verdict, _, _ = b.run(t, step{program: r.program(), frame: l.frame(b.world), mark: mark, plain: l.plain})
	})
	s, err := b.Stats()
	must(t, err)
	if n := s.Flows + s.Remote + s.VTEPs + s.Local; verdict != next || n != 0 || !slices.Equal(causes, r.causes()) {
		return fmt.Sprintf("verdict %d, %d entries, counted %q, want %q", int32(verdict), n, causes, r.causes())
	}
	return ""
}

// faultOf is a refusal or a lesson.
type faultOf interface {
	fault(*testing.T, *bench) string
}

// each calls f for the cases that apply to a world.
func casesOf(w world, f func(name string, c faultOf)) {
	for _, r := range refusals() {
		if r.only == nil || r.only(w) {
			f(r.name, r)
		}
	}
	for _, l := range lessons() {
		if l.only == nil || l.only(w) {
			f(l.name, l)
		}
	}
}

// The programs leave packets to the overlay unchanged, with or without a learn mark, and learn nothing from packets
// that are not to be trusted.
func TestLeftToTheOverlay(t *testing.T) {
	eachWorld(t, func(t *testing.T, b *bench) {
		casesOf(b.world, func(name string, c faultOf) {
			if fault := c.fault(t, b); fault != "" {
				t.Errorf("%s: %s", name, fault)
			}
		})
	})
}

func inner4(w world) bool  { return w.inner4 }
func inner6(w world) bool  { return !w.inner4 }
func outer6(w world) bool  { return !w.outer4 }
func bridged(w world) bool { return w.bridged }
func routed(w world) bool  { return !w.bridged }

// frames returns the frames of both directions with a body, each with its program's name before the case's.
func frames(body func(world) packet.Body, change ...change) map[string]func(world) []byte {
	return map[string]func(world) []byte{
		"out": func(w world) []byte { return w.sent(body(w), change...) },
		"in":  func(w world) []byte { return w.coming(body(w), change...) },
	}
}

// segment returns said or answered, with other flags.
func segment(f packet.TCPFlags) map[string]func(world) []byte {
	return map[string]func(world) []byte{
		"out": func(w world) []byte { return w.sent(flags(said, f)) },
		"in":  func(w world) []byte { return w.coming(flags(answered, f)) },
	}
}

// edited returns the frames of fill's connection, changed in the inner packet, whose header begins at ip.
func edited(edit func(w world, frame []byte, ip int) []byte) map[string]func(world) []byte {
	return map[string]func(world) []byte{
		"out": func(w world) []byte { return edit(w, w.sent(said), 14) },
		"in":  func(w world) []byte { return edit(w, w.coming(answered), w.at("inner")) },
	}
}

// set returns an edit that replaces a byte of the inner packet.
func set(at int, value byte) map[string]func(world) []byte {
	return edited(func(_ world, f []byte, ip int) []byte { f[ip+at] = value; return f })
}

// both returns a case for each direction.
func both(r refusal, frames map[string]func(world) []byte) (cases []refusal) {
	for _, program := range []string{"out", "in"} {
		one := r
		one.name, one.frame = program+": "+r.name, frames[program]
		cases = append(cases, one)
	}
	return cases
}
