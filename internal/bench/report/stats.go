package report

import (
	"math/rand/v2"
	"slices"
)

// Interval is a median with its 95 % bootstrap interval.
type Interval struct {
	Median float64 `json:"median"`
	Low    float64 `json:"low"`
	High   float64 `json:"high"`
}

// resamples is the number of resamples of the bootstrap. More resamples would change the ends of the interval by less
// than their accuracy.
const resamples = 2000

// Bootstrap returns the median of samples and the interval that contains 95 % of the medians of resamples (Efron's
// percentile method). It needs at least one sample.
func Bootstrap(samples []float64, random *rand.Rand) Interval {
	medians := make([]float64, resamples)
	again := make([]float64, len(samples))
	for i := range medians {
		for j := range again {
			again[j] = samples[random.IntN(len(samples))]
		}
		medians[i] = Median(again)
	}
	slices.Sort(medians)
	return Interval{
		Median: Median(samples),
		Low:    medians[resamples*25/1000],
		High:   medians[resamples*975/1000],
	}
}

func Median(samples []float64) float64 {
	s := slices.Sorted(slices.Values(samples))
	half := len(s) / 2
	if len(s)%2 == 1 {
		return s[half]
	}
	return (s[half-1] + s[half]) / 2
}

// Ratios returns the ratios of paired samples.
func Ratios(of, to []float64) []float64 {
	r := make([]float64, min(len(of), len(to)))
	for i := range r {
		r[i] = of[i] / to[i]
	}
	return r
}
