package service

import (
	"fmt"
	"math"
	"slices"
	"testing"
)

func maglevNames(n int) (names []string) {
	for i := range n {
		names = append(names, fmt.Sprintf("[fd70:696c:6100:%x:0:100:100:%x]:8080", i%16, i))
	}
	return names
}

// TestMaglevMovesFew: if one of 100 backends goes, at most 2 % of the slots get another backend, those of the backend
// that is gone included.
func TestMaglevMovesFew(t *testing.T) {
	names := maglevNames(100)
	size := MaglevSize(len(names))
	before := Maglev(names, size)
	worst := 0.0
	for gone := range names {
		after, moved := Maglev(slices.Delete(slices.Clone(names), gone, gone+1), size), 0
		for slot, i := range before {
			is := after[slot]
			if is >= gone {
				is++
			}
			if is != i {
				moved++
			}
		}
		share := float64(moved) / float64(size)
		if share == 0 {
			t.Fatalf("backend %d had no slot", gone)
		}
		worst = max(worst, share)
	}
	t.Logf("%d slots, at most %.2f %% moved", size, worst*100)
	if worst > 0.02 {
		t.Errorf("%.2f %% of the slots moved, want at most 2", worst*100)
	}
}

// TestMaglevIsFair: the shares of backends differ by at most 2 % while the table has 100 slots a backend or more.
func TestMaglevIsFair(t *testing.T) {
	for _, n := range []int{1, 2, 3, 100, 655} {
		size, count := MaglevSize(n), make([]int, n)
		for _, i := range Maglev(maglevNames(n), size) {
			count[i]++
		}
		low, high := slices.Min(count), slices.Max(count)
		if high-low > max(1, int(math.Ceil(0.02*float64(size)/float64(n)))) {
			t.Errorf("%d backends in %d slots: from %d to %d each", n, size, low, high)
		}
	}
	if Maglev(nil, 251) != nil {
		t.Error("a table without backends")
	}
}

// TestMaglevSize: sizes are primes.
func TestMaglevSize(t *testing.T) {
	for backends, want := range map[int]int{0: 251, 2: 1021, 3: 2039, 100: 65521, 1000: 65521} {
		got := MaglevSize(backends)
		if got != want {
			t.Errorf("%d backends: %d slots, want %d", backends, got, want)
		}
		for d := 2; d*d <= got; d++ {
			if got%d == 0 {
				t.Errorf("%d is not a prime: %d divides it", got, d)
			}
		}
	}
}
