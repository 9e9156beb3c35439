package admission

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// maxClients is how many clients have a limiter of their own: more than there are nodes.
const maxClients = 1 << 17

// Rates limits how often an operation may happen for each K.
type Rates[K comparable] struct {
	PerSecond int
	burst     int // operations
	now       func() time.Time
	mu        sync.Mutex
	by        map[K]*rate.Limiter
	swept     time.Time
	others    *rate.Limiter // shared by the clients beyond maxClients
}

func newRates[K comparable](perSecond, atOnce int) *Rates[K] {
	r := &Rates[K]{PerSecond: perSecond, burst: atOnce, now: time.Now, by: map[K]*rate.Limiter{}}
	r.others = r.limiter()
	return r
}

func (r *Rates[K]) limiter() *rate.Limiter { return rate.NewLimiter(rate.Limit(r.PerSecond), r.burst) }

func (r *Rates[K]) Allow(c K) bool { return r.of(c).AllowN(r.now(), 1) }

func (r *Rates[K]) of(c K) *rate.Limiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	l := r.by[c]
	if l == nil {
		if l = r.others; r.room() {
			l = r.limiter()
			r.by[c] = l
		}
	}
	return l
}

// room reports whether there is room for one more limiter. If not, it first removes those with a full burst, at most
// once a second: a new limiter for the same client has the same state.
func (r *Rates[K]) room() bool {
	if now := r.now(); len(r.by) >= maxClients && now.Sub(r.swept) > time.Second {
		r.swept = now
		for c, l := range r.by {
			if l.TokensAt(now) >= float64(l.Burst()) {
				delete(r.by, c)
			}
		}
	}
	return len(r.by) < maxClients
}

// source returns the address of a remote end, and the range of addresses that one stranger is assumed to control: an
// IPv4 address, or an IPv6 /64.
func source(remote string) (netip.Prefix, netip.Addr) {
	p, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Prefix{}, netip.Addr{}
	}
	a := p.Addr().Unmap().WithZone("")
	bits := 64
	if a.Is4() {
		bits = 32
	}
	from, _ := a.Prefix(bits)
	return from, a
}
