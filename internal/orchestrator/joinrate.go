package orchestrator

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// maxSources is how many sources are told apart at once.
const maxSources = 1 << 16

// joinRate bounds how often each source tries to join.
type joinRate struct {
	rate   int // a second
	mu     sync.Mutex
	by     map[netip.Prefix]*rate.Limiter
	swept  time.Time
	others *rate.Limiter // of sources that there are too many of
}

func newJoinRate(perSecond int) *joinRate {
	j := &joinRate{rate: perSecond, by: map[netip.Prefix]*rate.Limiter{}}
	j.others = j.limiter()
	return j
}

func (j *joinRate) limiter() *rate.Limiter { return rate.NewLimiter(rate.Limit(j.rate), 10*j.rate) }

func (j *joinRate) allow(from netip.Prefix) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	l := j.by[from]
	if l == nil {
		if l = j.others; j.room() {
			l = j.limiter()
			j.by[from] = l
		}
	}
	return l.Allow()
}

// room forgets whom forgetting changes nothing for, when there are too many.
func (j *joinRate) room() bool {
	if now := time.Now(); len(j.by) >= maxSources && now.Sub(j.swept) > time.Second {
		j.swept = now
		for from, l := range j.by {
			if l.TokensAt(now) >= float64(l.Burst()) {
				delete(j.by, from)
			}
		}
	}
	return len(j.by) < maxSources
}

// source is what one stranger can be thought to have: an address, or an IPv6 network of a link.
func source(remote string) netip.Prefix {
	p, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Prefix{}
	}
	a := p.Addr().Unmap().WithZone("")
	bits := 64
	if a.Is4() {
		bits = 32
	}
	from, _ := a.Prefix(bits)
	return from
}
