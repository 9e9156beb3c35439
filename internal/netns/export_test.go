package netns

var RetryDelete = retryDelete
