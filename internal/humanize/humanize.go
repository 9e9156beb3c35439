// Package humanize writes whole numbers as people read them.
package humanize

import "fmt"

// Whole are the types of what is counted; no number is negative.
type Whole interface {
	~int | ~int64 | ~uint32 | ~uint64
}

// Grouped writes 100000 as 100,000.
func Grouped[N Whole](n N) string {
	digits := fmt.Sprint(n)
	for at := len(digits) - 3; at > 0; at -= 3 {
		digits = digits[:at] + "," + digits[at:]
	}
	return digits
}

// Of says how many there are of what is called so: 1 entry, 1,000 entries.
func Of[N Whole](n N, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return Grouped(n) + " " + many
}
